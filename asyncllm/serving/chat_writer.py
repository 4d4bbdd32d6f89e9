"""ChatWriter: writes a chat completion in OpenAI's protocol, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring
from typing import Any

from asyncllm.outputs import Completion, CompletionOutput, Delta, ToolCall, Usage
from asyncllm.serving.call_collector import CallCollector
from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.choices import usage_fields
from asyncllm.serving.exchange import encode
from asyncllm.serving.running_usage import RunningUsage
from asyncllm.serving.token_logprobs import LogprobWriter, encode_logprobs, logprobs_size
from asyncllm.stream import TokenStream


class ChatWriter:
    """Writer of one chat completion.

    Args:
        model: the client's name for the model.
        request: the client's request.
        tokenizer: the engine's tokenizer.
    """

    def __init__(self, model: str, request: ChatRequest, tokenizer: Any) -> None:
        self._metadata = {} if request.metadata is None else {"metadata": request.metadata}
        self._fields = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "service_tier": "default",
            "system_fingerprint": None,
        }
        self._sends_usage = request.usage_of_stream != "none"
        self._running_usage = RunningUsage() if request.usage_of_stream == "each chunk" else None
        top = request.num_logprobs
        self._logprobs = None if top is None else LogprobWriter(tokenizer.spelling_of, top)
        self._call_collectors = [CallCollector() for _ in range(request.num_outputs)]
        common = encode({"object": "chat.completion.chunk", **self._fields})[:-1]
        # There is a chunk per token: their constant parts are serialised once.
        self._chunk_start = f'data: {common},"choices":[{{"index":'
        self._chunk_end = '}],"usage":null}\n\n' if self._sends_usage else "}]}\n\n"
        self._common_fields = common

    def full_answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = completions
        return {
            "object": "chat.completion",
            **self._fields,
            "choices": [self._choice(output) for output in completion.outputs],
            "usage": usage_fields([completion.usage]),
            **self._metadata,
        }

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
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
        return {"content": self._logprobs.write(output.logprobs or ()), "refusal": None}

    # --- streamed chunks ----------------------------------------------------------------

    def opening(self) -> str:
        first = {"role": "assistant", "content": "", "refusal": None}
        return "".join(self._chunk(index, first) for index in range(len(self._call_collectors)))

    def chunks(self, delta: Delta, base: int, stream: TokenStream) -> str:
        if self._running_usage is not None:
            self._chunk_end = f'}}],"usage":{self._running_usage.add(delta, base, stream)}}}\n\n'
        if not delta.reasoning and not delta.tool_calls and self._logprobs is None:
            written = self._text_chunk(delta) if delta.text else ""
        else:
            written = self._full_chunk(delta)
        if delta.finish_reason is not None:
            written += self._chunk(delta.index, {}, finish_reason=delta.finish_reason)
        return written

    def size(self, delta: Delta, base: int, stream: TokenStream) -> int:
        return logprobs_size(delta.logprobs)

    def _text_chunk(self, delta: Delta) -> str:
        return (
            f'{self._chunk_start}{delta.index},"delta":{{"content":{encode_basestring(delta.text)}}}'
            f',"logprobs":null,"finish_reason":null{self._chunk_end}'
        )

    def _full_chunk(self, delta: Delta) -> str:
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.text or delta.logprobs:
            fields["content"] = delta.text
        if calls := self._complete_calls(delta):
            fields["tool_calls"] = calls
        if not fields:
            return ""
        return self._chunk(delta.index, fields, self._logprob_fields(delta))

    def _complete_calls(self, delta: Delta) -> list[dict[str, Any]]:
        collected = self._call_collectors[delta.index]
        first = collected.num_calls
        calls: Iterable[ToolCall] = collected.push(delta.tool_calls)
        return [{"index": i, **call.as_dict()} for i, call in enumerate(calls, first)]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> str:
        fields = {"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        rest = encode(fields) if logprobs is None else encode_logprobs(fields)
        return f"{self._chunk_start}{index},{rest[1:-1]}{self._chunk_end}"

    def final_chunks(self, usages: Sequence[Usage | None]) -> str:
        if not self._sends_usage:
            return ""
        usage = encode(usage_fields(usages))
        return f'data: {self._common_fields},"choices":[],"usage":{usage}}}\n\n'
