"""CompletionRequest: the body of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Discriminator, Field, Tag

from asyncllm.engine import AsyncLLMEngine
from asyncllm.serving.request_body import AcceptedValues, unsupported_error
from asyncllm.serving.sampling_fields import ChoicesRequest, TokenIds
from asyncllm.stream import TokenStream
from asyncllm.validation import MAX_INTEGER, argument_error, value_error

MAX_PROMPTS = 256
MAX_ECHOED_CHARACTERS = 1 << 20
"""Maximum number of prompt characters that an answer with ``echo`` repeats: all prompts count once
for each output but the first. A token id counts as BYTES_PER_TOKEN characters."""

BYTES_PER_TOKEN = 4
"""Typical number of bytes of a token's text."""

DEFAULT_MAX_TOKENS = 16
"""Value of ``max_tokens`` for a request that leaves it out, as in OpenAI's protocol."""


def encode_text(text: str) -> bytes:
    """Encode a text as UTF-8. JSON can spell lone surrogates, which are kept."""
    return text.encode("utf-8", "surrogatepass")


def _get_prompt_tag(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, list):
        return "#lists"
    if isinstance(value, list):
        return "#texts" if isinstance(first, str) else "#ids"
    return "#text"


_T = TypeVar("_T")
_PromptText = Annotated[str, Field(min_length=1)]
_PromptIds = Annotated[TokenIds, Field(min_length=1)]
_Prompts = Annotated[list[_T], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Prompt = Annotated[
    Annotated[_PromptText, Tag("#text")]
    | Annotated[_PromptIds, Tag("#ids")]
    | Annotated[_Prompts[_PromptText], Tag("#texts")]
    | Annotated[_Prompts[_PromptIds], Tag("#lists")],
    Discriminator(_get_prompt_tag),
]


class CompletionRequest(ChoicesRequest):
    """Body of a completion: OpenAI's fields, and those of SamplingParams."""

    FOREIGN_NAMES_SECTION = "field of /v1/completions"

    ACCEPTED_VALUES: ClassVar[AcceptedValues] = {"suffix": ("",)}

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None

    @property
    def prompts(self) -> list[Any]:
        """List of the prompts: texts and lists of token ids."""
        is_list = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if is_list else [self.prompt]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def should_generate(self) -> bool:
        """Whether tokens are generated; false for a request that only scores its prompts."""
        return self.max_tokens != 0

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def max_logprobs_tokens(self, max_model_len: int) -> int:
        num_outputs = self.num_prompts * self.num_outputs
        num_tokens = num_outputs * min(self._num_tokens_to_generate, max_model_len)
        for prompt in self.prompts if self.echo else ():
            # A text has at most as many tokens as bytes, but for a few such as BOS.
            ids = encode_text(prompt) if isinstance(prompt, str) else prompt
            num_tokens += min(len(ids), max_model_len)
        return num_tokens

    @property
    def num_echoed_bytes(self) -> int:
        if not self.echo:
            return 0
        return self.num_outputs * sum(
            len(encode_text(prompt)) if isinstance(prompt, str) else BYTES_PER_TOKEN * len(prompt)
            for prompt in self.prompts
        )

    @property
    def _num_tokens_to_generate(self) -> int:
        """Maximum number of tokens of an output. At least one, because the engine computes the
        whole prompt only if it samples a token."""
        return max(DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens, 1)

    def submit(self, engine: AsyncLLMEngine, options: Mapping[str, Any]) -> Sequence[TokenStream]:
        if self.best_of is not None and self.best_of != self.num_outputs:
            raise unsupported_error("best_of", self.best_of, (self.num_outputs,))
        if self.min_tokens and not self.should_generate:
            raise value_error("min_tokens", self.min_tokens, "at most max_tokens=0")
        if self.echo and self.num_outputs > 1:
            num_characters = sum(
                len(prompt) * (1 if isinstance(prompt, str) else BYTES_PER_TOKEN)
                for prompt in self.prompts
            )
            if (self.num_outputs - 1) * num_characters > MAX_ECHOED_CHARACTERS:
                problem = f"{self.num_outputs} outputs would repeat {num_characters} characters"
                raise argument_error(
                    "echo", f"{problem}, expected at most {MAX_ECHOED_CHARACTERS} in all"
                )
        params = self.sampling_params(
            n=self.num_outputs,
            max_tokens=self._num_tokens_to_generate,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )
        streams: list[TokenStream] = []
        try:
            for prompt in self.prompts:
                streams.append(engine.stream(prompt, params, **options, **self.scheduling_options))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams
