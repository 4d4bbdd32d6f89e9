"""AsyncLLMStreamedResponse: a stream of the engine as Pydantic AI's events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic_ai.messages import ModelResponseStreamEvent
from pydantic_ai.models import StreamedResponse

from asyncllm import Delta
from asyncllm.stream import TokenStream
from pydantic_ai_asyncllm.errors import as_model_errors
from pydantic_ai_asyncllm.messages import FINISH_REASONS, to_usage


@dataclass
class AsyncLLMStreamedResponse(StreamedResponse):
    """Reads a stream whose first delta was read when it was opened.

    The engine hands out the fragments of a tool call as they come. One that is cut off or malformed
    never becomes ``done``, and all of it is in the text: a bracket behind its arguments makes sure
    that they do not parse, so that no tool is called with what there is of them.
    """

    _model_name: str
    _stream: TokenStream
    _first: Delta | None
    _timestamp: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def _get_event_iterator(self) -> AsyncIterator[ModelResponseStreamEvent]:
        open_calls: set[int] = set()
        delta = self._first
        with as_model_errors(self._model_name, in_stream=True):
            while delta is not None:
                for event in self._events(delta, open_calls):
                    yield event
                delta = await anext(self._stream, None)

    def _events(self, delta: Delta, open_calls: set[int]) -> Iterator[ModelResponseStreamEvent]:
        parts = self._parts_manager
        if delta.reasoning:
            yield from parts.handle_thinking_delta(
                vendor_part_id="reasoning", content=delta.reasoning
            )
        if delta.text:
            yield from parts.handle_text_delta(vendor_part_id="text", content=delta.text)
        for call in delta.tool_calls:
            open_calls.add(call.index)
            if call.done:
                open_calls.discard(call.index)
            yield from self._call_events(call.index, call.arguments, call.name, call.id)
        if delta.finish_reason is not None:
            for index in open_calls:
                yield from self._call_events(index, "]")
            self.finish_reason = FINISH_REASONS.get(delta.finish_reason)
            self.provider_details = {"finish_reason": delta.finish_reason}
        if delta.usage is not None:
            self._usage = to_usage(delta.usage)

    def _call_events(
        self, index: int, arguments: str, name: str | None = None, call_id: str | None = None
    ) -> Iterator[Any]:
        return self._parts_manager.handle_tool_call_delta_events(
            vendor_part_id=index, tool_name=name, args=arguments, tool_call_id=call_id
        )

    async def close_stream(self) -> None:
        self._stream.abort()

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def provider_name(self) -> str:
        return "asyncllm"

    @property
    def provider_url(self) -> None:
        return None

    @property
    def timestamp(self) -> datetime:
        return self._timestamp
