"""ChoicesWriter: base of the writers of completions and chat completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from pydantic_core import to_json

from asyncllm.outputs import Completion, CompletionOutput, Delta, TokenLogprobs, Usage
from asyncllm.serving.answers import TokenUsage, TruncationUsage
from asyncllm.serving.exchange import encode_json
from asyncllm.serving.running_usage import RunningUsage
from asyncllm.serving.sampling_fields import ChoicesRequest
from asyncllm.serving.token_logprobs import num_logprobs_bytes
from asyncllm.stream import TokenStream


class ChoicesWriter:
    """Writer of one answer, whole or in server-sent events.

    In its methods, ``first_choice_index`` is the index of a stream's first choice in the answer.

    Class attributes:
        ID_PREFIX: prefix of the answer's id.
        OBJECT_TYPE, CHUNK_OBJECT_TYPE: field ``object`` of a whole answer, and of a streamed chunk.
        BYTES_PER_LOGPROB: approximate number of JSON bytes of one log-probability.

    Attributes:
        repeats_prompts: whether the answer repeats its prompts.

    Args:
        model: the client's name for the model.
        request: the client's request.
        extra_fields: further fields of the answer and of each chunk.
    """

    ID_PREFIX: ClassVar[str]
    OBJECT_TYPE: ClassVar[str]
    CHUNK_OBJECT_TYPE: ClassVar[str]
    BYTES_PER_LOGPROB: ClassVar[int]
    repeats_prompts: bool = False

    def __init__(self, model: str, request: ChoicesRequest, **extra_fields: Any) -> None:
        self._fields = {
            "object": self.OBJECT_TYPE,
            "id": f"{self.ID_PREFIX}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
            **extra_fields,
        }
        chunks_with_usage = request.chunks_with_usage
        self._sends_usage = chunks_with_usage != "none"
        self._running_usage = RunningUsage() if chunks_with_usage == "each chunk" else None
        # Serialised once, because there is a chunk per token.
        self._chunk_start = (
            f"data: {encode_json({**self._fields, 'object': self.CHUNK_OBJECT_TYPE})[:-1]}"
        )

    def full_answer(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """Make the JSON of a whole answer in parts. Each choice is made when its part is read,
        because its objects take several times the memory of the JSON."""
        separator = b'%b,"choices":[' % to_json(self._fields)[:-1]
        for i, completion in enumerate(completions):
            for output in completion.outputs:
                choice = self._make_choice(output, i * len(completion.outputs), completion)
                yield separator
                yield to_json(choice)
                separator = b","
        yield b"],%b" % to_json(self._final_fields(completions))[1:]

    def _final_fields(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Fields of a whole answer after its choices."""
        return {"usage": self._usage([completion.usage for completion in completions])}

    def num_full_answer_logprobs_bytes(self, completions: Sequence[Completion]) -> int:
        """Approximate number of JSON bytes of the log-probabilities in a whole answer."""
        return sum(
            self._num_logprobs_bytes(logprobs)
            for completion in completions
            for output in completion.outputs  # Each may echo the prompt.
            for logprobs in (output.logprobs, completion.prompt_logprobs)
        )

    def _num_logprobs_bytes(self, logprobs: Sequence[TokenLogprobs | None] | None) -> int:
        return num_logprobs_bytes(logprobs, self.BYTES_PER_LOGPROB)

    def _make_choice(
        self, output: CompletionOutput, first_choice_index: int, completion: Completion
    ) -> dict[str, Any]:
        """``choices`` entry of a whole answer, for one output of a prompt."""
        raise NotImplementedError

    def first_chunks(self) -> str:
        """Events before the first delta."""
        return ""

    def chunks(self, delta: Delta, first_choice_index: int, stream: TokenStream) -> str:
        """Events of a delta, or an empty text if there is nothing to send yet."""
        raise NotImplementedError

    def num_logprobs_bytes(self, delta: Delta, first_choice_index: int, stream: TokenStream) -> int:
        """Approximate number of JSON bytes of a delta's log-probabilities."""
        return self._num_logprobs_bytes(delta.logprobs)

    def final_chunks(self, usages: Sequence[Usage | None]) -> str:
        """Events after the last delta."""
        return self._chunk("", encode_json(self._usage(usages))) if self._sends_usage else ""

    def _chunk(self, choice: str, usage: str = "null") -> str:
        """Event with one choice, or none, and with ``usage`` if the client asked for it."""
        usage_field = f',"usage":{usage}' if self._sends_usage else ""
        return f'{self._chunk_start},"choices":[{choice}]{usage_field}}}\n\n'

    def _count_usage(self, delta: Delta, first_choice_index: int, stream: TokenStream) -> str:
        """Add a delta's tokens to the usage; returns ``usage`` as JSON for the delta's chunks."""
        counts = self._running_usage
        return "null" if counts is None else counts.add(delta, first_choice_index, stream)

    def _usage(self, usages: Iterable[Usage | None]) -> TokenUsage:
        """``usage`` of one or several streams."""
        ended = [usage for usage in usages if usage is not None]
        return {
            "prompt_tokens": sum(usage.prompt_tokens for usage in ended),
            "completion_tokens": sum(usage.completion_tokens for usage in ended),
            "total_tokens": sum(usage.total_tokens for usage in ended),
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in ended)},
            **truncation_field(sum(usage.truncated_prompt_tokens for usage in ended)),
        }


def truncation_field(num_tokens: int) -> TruncationUsage:
    """Field of ``usage`` with the number of tokens cut from a prompt, if there are any."""
    return {"truncated_prompt_tokens": num_tokens} if num_tokens else {}
