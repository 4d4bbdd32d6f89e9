"""CompletionWriter: writes a completion in OpenAI's protocol, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asyncllm.outputs import Completion, CompletionOutput, Delta, TokenLogprobs, Usage
from asyncllm.serving.answers import TokenUsage
from asyncllm.serving.choices_writer import ChoicesWriter
from asyncllm.serving.completion_request import CompletionRequest, encode_text
from asyncllm.serving.exchange import encode_json
from asyncllm.serving.token_logprobs import (
    LEGACY_BYTES_PER_ENTRY,
    LegacyLogprobFormatter,
    encode_logprobs,
)
from asyncllm.stream import TokenStream


class CompletionWriter(ChoicesWriter):
    """Writer of one completion. Choices are ordered by prompt.

    Args:
        tokenizer: the engine's tokenizer.
    """

    ID_PREFIX, OBJECT_TYPE, CHUNK_OBJECT_TYPE = "cmpl", "text_completion", "text_completion"
    BYTES_PER_LOGPROB = LEGACY_BYTES_PER_ENTRY

    def __init__(self, model: str, request: CompletionRequest, tokenizer: Any) -> None:
        super().__init__(model, request)
        # Keep no reference to the request: its prompts may take megabytes.
        self._should_generate, self._num_outputs = request.should_generate, request.num_outputs
        self._tokenizer = tokenizer
        self.repeats_prompts = bool(request.echo)
        top = request.logprobs
        prompts = request.prompts
        num_choices = len(prompts) * request.num_outputs
        self._unechoed_choices = set(range(num_choices)) if request.echo else set[int]()
        # Keep UTF-8: one emoji makes a ``str`` four times as large.
        self._unechoed_texts = {
            index: encode_text(prompt)
            for index, prompt in enumerate(prompts)
            if request.echo and isinstance(prompt, str)
        }
        self._logprobs = [
            None if top is None else LegacyLogprobFormatter(tokenizer.id_to_text_and_bytes, top)
            for _ in range(num_choices)
        ]

    def chunks(self, delta: Delta, first_choice_index: int, stream: TokenStream) -> str:
        usage = self._count_usage(delta, first_choice_index, stream)
        echoes = first_choice_index + delta.index in self._unechoed_choices
        choice = self._make_choice(delta, first_choice_index, stream)
        if echoes and self._has_echoed(first_choice_index // self._num_outputs):
            stream._drop_prompt()
        if not choice["text"] and not delta.logprobs and delta.finish_reason is None:
            return ""
        return self._chunk(
            encode_logprobs(choice) if choice["logprobs"] else encode_json(choice), usage
        )

    def num_logprobs_bytes(self, delta: Delta, first_choice_index: int, stream: TokenStream) -> int:
        echoes = first_choice_index + delta.index in self._unechoed_choices
        prompt = stream.prompt_logprobs if echoes else None
        return self._num_logprobs_bytes(delta.logprobs) + self._num_logprobs_bytes(prompt)

    def _usage(self, usages: Iterable[Usage | None]) -> TokenUsage:
        usage = super()._usage(usages)
        if not self._should_generate:
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage

    def _make_choice(
        self,
        output: CompletionOutput | Delta,
        first_choice_index: int,
        completion: Completion | TokenStream,
    ) -> dict[str, Any]:
        """Choice of a chunk or of a whole answer; begins with the prompt if it is to be echoed.

        Args:
            completion: the output's completion or stream, which also has the prompt.
        """
        index = first_choice_index + output.index
        formatter, text, first_token_id = self._logprobs[index], output.text, None
        logprobs: Sequence[TokenLogprobs | None] = output.logprobs or ()
        if not self._should_generate:
            text, logprobs = "", ()
        if index in self._unechoed_choices:
            self._unechoed_choices.discard(index)
            prompt_token_ids = list(completion.prompt_token_ids or ())
            text = self._prompt_text(index // self._num_outputs, prompt_token_ids) + text
            if completion.prompt_logprobs is not None:
                first_token_id = prompt_token_ids[0]
                logprobs = (*completion.prompt_logprobs, *logprobs)
        return {
            "index": index,
            "text": text,
            "logprobs": None if formatter is None else formatter.format(logprobs, first_token_id),
            "finish_reason": output.finish_reason,
        }

    def _prompt_text(self, prompt_index: int, token_ids: list[int]) -> str:
        """Text of a prompt, which is freed once the prompt's last output has begun."""
        text = self._unechoed_texts.get(prompt_index)
        if text is None:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        if self._has_echoed(prompt_index):
            del self._unechoed_texts[prompt_index]
        return text.decode("utf-8", "surrogatepass")

    def _has_echoed(self, prompt_index: int) -> bool:
        """Whether all outputs of a prompt have begun with the prompt."""
        first, count = prompt_index * self._num_outputs, self._num_outputs
        return self._unechoed_choices.isdisjoint(range(first, first + count))
