"""ChatWriter: writes a chat completion in OpenAI's protocol, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from asyncllm.outputs import Completion, CompletionOutput, Delta
from asyncllm.serving.call_collector import ToolCallCollector
from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.choices_writer import ChoicesWriter
from asyncllm.serving.exchange import encode_json
from asyncllm.serving.token_logprobs import (
    BYTES_PER_ENTRY,
    LogprobFormatter,
    encode_logprobs,
)
from asyncllm.stream import TokenStream


class ChatWriter(ChoicesWriter):
    """Writer of one chat completion.

    Args:
        tokenizer: the engine's tokenizer.
    """

    ID_PREFIX = "chatcmpl"
    OBJECT_TYPE = "chat.completion"
    CHUNK_OBJECT_TYPE = "chat.completion.chunk"
    BYTES_PER_LOGPROB = BYTES_PER_ENTRY

    def __init__(self, model: str, request: ChatRequest, tokenizer: Any) -> None:
        super().__init__(model, request, service_tier="default")
        self._metadata = {} if request.metadata is None else {"metadata": request.metadata}
        top = request.num_logprobs
        self._logprobs = (
            None if top is None else LogprobFormatter(tokenizer.id_to_text_and_bytes, top)
        )
        self._call_collectors = [ToolCallCollector() for _ in range(request.num_outputs)]

    def _final_fields(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return {**super()._final_fields(completions), **self._metadata}

    def _make_choice(
        self, output: CompletionOutput, first_choice_index: int, completion: Completion
    ) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if output.tool_calls and not output.text else output.text,
            "refusal": None,
            "annotations": [],
        }
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in output.tool_calls]
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprob_fields(output),
            "finish_reason": output.finish_reason,
        }

    def _logprob_fields(self, output: CompletionOutput | Delta) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return {"content": self._logprobs.format(output.logprobs or ()), "refusal": None}

    # --- streamed chunks ----------------------------------------------------------------

    def first_chunks(self) -> str:
        first = {"role": "assistant", "content": "", "refusal": None}
        return "".join(
            self._delta_chunk(index, first, "null") for index in range(len(self._call_collectors))
        )

    def chunks(self, delta: Delta, first_choice_index: int, stream: TokenStream) -> str:
        usage = self._count_usage(delta, first_choice_index, stream)
        if not delta.reasoning and not delta.tool_calls and self._logprobs is None:
            written = self._text_chunk(delta, usage) if delta.text else ""
        else:
            written = self._slow_path_chunk(delta, usage)
        if delta.finish_reason is not None:
            written += self._delta_chunk(delta.index, {}, usage, finish_reason=delta.finish_reason)
        return written

    def _text_chunk(self, delta: Delta, usage: str) -> str:
        """Chunk with text alone, as for nearly every token. A JSON encoder would be slower."""
        return self._chunk(
            f'{{"index":{delta.index},"delta":{{"content":{encode_basestring(delta.text)}}},'
            '"logprobs":null,"finish_reason":null}',
            usage,
        )

    def _slow_path_chunk(self, delta: Delta, usage: str) -> str:
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.text or delta.logprobs:
            fields["content"] = delta.text
        if calls := self._call_collectors[delta.index].push(delta.tool_calls):
            fields["tool_calls"] = [{"index": i, **call.as_dict()} for i, call in calls]
        if not fields:
            return ""
        return self._delta_chunk(delta.index, fields, usage, self._logprob_fields(delta))

    def _delta_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        usage: str,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> str:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._chunk(
            encode_json(choice) if logprobs is None else encode_logprobs(choice), usage
        )
