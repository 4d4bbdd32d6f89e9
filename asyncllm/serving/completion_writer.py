"""CompletionWriter: writes a completion in OpenAI's protocol, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncllm.outputs import Completion, CompletionOutput, Delta, TokenLogprobs, Usage
from asyncllm.serving.answers import TokenUsage
from asyncllm.serving.choices_writer import ChoicesWriter
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.exchange import encode
from asyncllm.serving.token_logprobs import LegacyLogprobs, encode_logprobs, logprobs_size
from asyncllm.stream import TokenStream


@dataclass(slots=True)
class _Choice:
    """Progress of one choice's output.

    Attributes:
        echoed: whether the prompt of the choice was sent.
    """

    logprobs: LegacyLogprobs | None
    echoed: bool


class CompletionWriter(ChoicesWriter):
    """Writer of one completion. Choices are ordered by prompt.

    Args:
        tokenizer: the engine's tokenizer.
    """

    ID_PREFIX, OBJECT, CHUNK_OBJECT = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, request: CompletionRequest, tokenizer: Any) -> None:
        super().__init__(model, request)
        self._request = request
        self._tokenizer = tokenizer
        top = request.logprobs
        self._choices = [
            _Choice(None if top is None else LegacyLogprobs(tokenizer.spelling_of, top), False)
            for _ in range(len(request.prompts) * request.num_outputs)
        ]

    def _full_choice(
        self, prompt_index: int, completion: Completion, output: CompletionOutput
    ) -> dict[str, Any]:
        return self._choice(output, prompt_index * self._request.num_outputs, completion)

    def chunks(self, delta: Delta, base: int, stream: TokenStream) -> str:
        usage = self._count_usage(delta, base, stream)
        choice = self._choice(delta, base, stream)
        if not choice["text"] and not delta.logprobs and delta.finish_reason is None:
            return ""
        return self._chunk(encode_logprobs(choice) if choice["logprobs"] else encode(choice), usage)

    def size(self, delta: Delta, base: int, stream: TokenStream) -> int:
        echoes = self._request.echo and not self._choices[base + delta.index].echoed
        return super().size(delta, base, stream) + (
            logprobs_size(stream.prompt_logprobs) if echoes else 0
        )

    def _usage(self, usages: Iterable[Usage | None]) -> TokenUsage:
        usage = super()._usage(usages)
        if not self._request.generates:
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage

    def _choice(
        self, output: CompletionOutput | Delta, base: int, source: Completion | TokenStream
    ) -> dict[str, Any]:
        """Choice with new or all text of an output, and the prompt before it if it is echoed.

        Args:
            source: completion or stream of the output, which has the prompt.
        """
        index = base + output.index
        choice, text, first = self._choices[index], output.text, None
        logprobs: Sequence[TokenLogprobs | None] = output.logprobs or ()
        if not self._request.generates:
            text, logprobs = "", ()
        if self._request.echo and not choice.echoed:
            choice.echoed = True
            prompt_token_ids = list(source.prompt_token_ids or ())
            text = self._prompt_text(index // self._request.num_outputs, prompt_token_ids) + text
            if source.prompt_logprobs is not None:
                first = prompt_token_ids[0]
                logprobs = (*source.prompt_logprobs, *logprobs)
        return {
            "index": index,
            "text": text,
            "logprobs": None if choice.logprobs is None else choice.logprobs.write(logprobs, first),
            "finish_reason": output.finish_reason,
        }

    def _prompt_text(self, prompt_index: int, token_ids: list[int]) -> str:
        prompt = self._request.prompts[prompt_index]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
