"""ResponseEvents: writes the events of one response in OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from json.encoder import encode_basestring
from typing import Any

from asyncllm.outputs import Delta, TokenLogprobs, ToolCall, Usage
from asyncllm.serving.answers import ItemStatus
from asyncllm.serving.call_collector import ToolCallCollector
from asyncllm.serving.exchange import encode_json
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.response_items import CallItem, TextItem
from asyncllm.serving.response_object import ResponseObject
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.token_logprobs import (
    BYTES_PER_ENTRY,
    LogprobFormatter,
    encode_logprobs,
    num_logprobs_bytes,
)

ResponseEvent = tuple[str, str | bytes]
"""Type of the event, and the whole event as JSON. One that repeats the request is UTF-8, which
takes up to a quarter of the memory of a ``str``."""


class ResponseEvents:
    """Writer of one response's events; each method returns events to send, in order.

    A response has at most one message. Text after a tool call continues the message, so the items
    do not depend on how the text was split into deltas.

    Args:
        request: the client's request.
        response: the response's object.
        id_to_text_and_bytes: function from token id to text and bytes, for log-probabilities.

    Attributes:
        id: id of the response.
        num_tokens: tokens generated so far.
        num_repeated_bytes: bytes of the request's fields, which the longest events repeat.
        should_generate: whether tokens are generated; false for a request that only fills the
            prefix cache.
        has_delta_logprobs: whether text deltas contain log-probabilities; false for an answer that
            is not streamed.
        response_json: JSON of the response once it has ended; empty before.
    """

    def __init__(
        self,
        request: ResponseRequest,
        response: ResponseObject,
        id_to_text_and_bytes: Callable[[int], tuple[str, list[int]]],
    ) -> None:
        self.id = response.id
        self.num_tokens = 0
        self.num_repeated_bytes = response.num_repeated_bytes
        self.should_generate = request.should_generate
        self.has_delta_logprobs = True
        self._final_response_json = b""
        self._logprobs_json = b""
        self._num_written_logprobs_bytes = 0
        self._response = response
        top = request.num_logprobs
        self._logprobs = None if top is None else LogprobFormatter(id_to_text_and_bytes, top)
        self._sequence_number = 0
        self._items: list[TextItem | CallItem] = []
        self._message_item: TextItem | None = None
        self._reasoning_item: TextItem | None = None
        self._call_collector = ToolCallCollector()
        self._unsent_logprobs: list[TokenLogprobs] = []
        self._text_event_start = ""

    @property
    def num_logprobs_bytes(self) -> int:
        """JSON bytes of the message's log-probabilities; an estimate for those not sent yet."""
        unsent = num_logprobs_bytes(self._unsent_logprobs, BYTES_PER_ENTRY)
        return self._num_written_logprobs_bytes + unsent

    @property
    def response_json(self) -> bytes:
        """JSON of the response once it has ended; empty before."""
        return self._insert_logprobs(self._final_response_json)

    def insert_logprobs(self, event: ResponseEvent) -> ResponseEvent:
        """Insert the message's log-probabilities into one of the last events."""
        return event[0], self._insert_logprobs(event[1])

    def _insert_logprobs(self, data: str | bytes) -> bytes:
        data, item = data if isinstance(data, bytes) else data.encode(), self._message_item
        if item is None or not item.logprobs:
            return data
        if not self._logprobs_json:
            self.encode_logprobs()
        return data.replace(b'"%b"' % item.logprobs_mark.encode(), self._logprobs_json)

    def encode_logprobs(self) -> None:
        """Make the JSON of the message's log-probabilities, which ``insert_logprobs`` inserts."""
        if self._message_item is not None:
            # Kept as UTF-8, because in a ``str`` with one emoji every character takes four bytes.
            self._logprobs_json = self._encode_logprobs(self._message_item.logprobs).encode()

    def free_logprobs(self) -> None:
        """Free the JSON of the message's log-probabilities."""
        self._logprobs_json = b""

    def _encode_logprobs(self, logprobs: list[TokenLogprobs]) -> str:
        if self._logprobs is None or not logprobs:
            return "[]"
        return encode_logprobs(self._logprobs.format(logprobs))

    def assistant_message(self) -> dict[str, Any]:
        """The answer as a message of the assistant, for the history of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self._items:
            if isinstance(item, CallItem):
                message.setdefault("tool_calls", []).append(item.call.as_dict())
            elif item.is_reasoning:
                message["reasoning_content"] = message.get("reasoning_content", "") + item.text
            else:
                message["content"] = item.text
        return message

    def created_events(self) -> Iterator[ResponseEvent]:
        """First events of a response, sent once its request is accepted."""
        response_json = self._response_object("in_progress")
        yield self._response_event("response.created", response_json)
        yield self._response_event("response.in_progress", response_json)

    def delta_events(self, delta: Delta) -> Iterable[ResponseEvent]:
        """Events of a delta."""
        self.num_tokens += len(delta.token_ids)
        message = self._message_item
        if (
            delta.text
            and message is not None
            and self._logprobs is None
            and self._reasoning_item is None
            and not delta.reasoning
            and not delta.tool_calls
        ):
            # Fast path of nearly every token: one event, without generators.
            message.texts.append(delta.text)
            return (self._text_event(delta.text, "[]"),)
        return self._slow_path_events(delta)

    def _slow_path_events(self, delta: Delta) -> Iterator[ResponseEvent]:
        if delta.reasoning:
            self._unsent_logprobs.clear()
            yield from self._add_reasoning(delta.reasoning)
        if self._logprobs is not None and delta.logprobs:
            self._unsent_logprobs += delta.logprobs
        if delta.text or (self._unsent_logprobs and self._message_item is not None):
            yield from self._add_text(delta.text)
        for _, call in self._call_collector.push(delta.tool_calls):
            yield from self._add_call(call)

    def completed_events(
        self, finish_reason: str | None, usage: Usage | None
    ) -> Iterator[ResponseEvent]:
        """Events at the end of a response; ``insert_logprobs`` adds their log-probabilities. The
        finish reason ``abort`` means that the client cancelled the response."""
        if not self.should_generate:
            yield self._final_event("response.completed", self._response_object("completed", usage))
            return
        is_complete = finish_reason in ("stop", "tool_calls")
        item_status: ItemStatus = "completed" if is_complete else "incomplete"
        yield from self._close_reasoning(item_status)
        if self._unsent_logprobs or not self._items:
            yield from self._add_text("")
        if self._message_item is not None:
            self.encode_logprobs()
            yield from self._close_item(self._message_item, item_status)
        status = {"length": "incomplete", "abort": "cancelled"}.get(
            finish_reason or "", "completed"
        )
        kind = "response.completed" if is_complete else "response.incomplete"
        yield self._final_event(kind, self._response_object(status, usage))

    def failed_events(self, error: ProtocolError) -> Iterator[ResponseEvent]:
        """Events for an error that ends an accepted request."""
        for item in self._items:
            item.status = "incomplete" if item.status == "in_progress" else item.status
        code = "invalid_prompt" if error.is_client_error else "server_error"
        if error.code == "context_length_exceeded":
            code = error.code  # OpenAI's servers send this code.
        fields = {"code": code, "message": str(error), "param": error.param}
        response_json = self._response_object("failed", error=fields)
        yield self.insert_logprobs(self._final_event("response.failed", response_json))

    # --- items --------------------------------------------------------------------------

    def _add_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if self._reasoning_item is None:
            self._reasoning_item = TextItem(len(self._items), is_reasoning=True)
            yield from self._open_item(self._reasoning_item)
        self._reasoning_item.texts.append(text)
        yield self._make_event(
            "response.reasoning_text.delta", **self._reasoning_item.event_fields, delta=text
        )

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        yield from self._close_reasoning("completed")
        if self._message_item is None:
            self._message_item = TextItem(len(self._items), is_reasoning=False)
            yield from self._open_item(self._message_item)
            item_fields = encode_json(self._message_item.event_fields)[1:-1]
            self._text_event_start = f'{{"type":"response.output_text.delta",{item_fields},"delta":'
        logprobs, self._unsent_logprobs = self._unsent_logprobs, []
        if not text and not logprobs:
            return
        self._message_item.texts.append(text)
        self._message_item.logprobs += logprobs
        if not self.has_delta_logprobs:
            self._num_written_logprobs_bytes += num_logprobs_bytes(logprobs, BYTES_PER_ENTRY)
            return
        logprobs_json = self._encode_logprobs(logprobs)
        if logprobs:
            self._num_written_logprobs_bytes += len(logprobs_json.encode())
        yield self._text_event(text, logprobs_json)

    def _text_event(self, text: str, logprobs: str) -> ResponseEvent:
        """Event of new text. Nearly every token has one, so the slow JSON encoder is not used."""
        number = self._sequence_number
        self._sequence_number = number + 1
        return (
            "response.output_text.delta",
            f'{self._text_event_start}{encode_basestring(text)},"logprobs":{logprobs},'
            f'"sequence_number":{number}}}',
        )

    def _add_call(self, call: ToolCall) -> Iterator[ResponseEvent]:
        yield from self._close_reasoning("completed")
        item = CallItem(len(self._items), call)
        self._items.append(item)
        item_fields = {"item_id": item.id, "output_index": item.index}
        yield self._item_event("added", item)
        arguments = call.arguments
        yield self._make_event(
            "response.function_call_arguments.delta", **item_fields, delta=arguments
        )
        yield self._make_event(
            "response.function_call_arguments.done",
            **item_fields,
            name=call.name,
            arguments=arguments,
        )
        item.status = "completed"
        yield self._item_event("done", item)

    def _open_item(self, item: TextItem) -> Iterator[ResponseEvent]:
        self._items.append(item)
        yield self._item_event("added", item)
        yield self._make_event(
            "response.content_part.added", **item.event_fields, part=item.content_part()
        )

    def _close_reasoning(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        if self._reasoning_item is not None:
            item, self._reasoning_item = self._reasoning_item, None
            yield from self._close_item(item, status)

    def _close_item(self, item: TextItem, status: ItemStatus) -> Iterator[ResponseEvent]:
        item.status = status
        kind, more = "response.output_text.done", {"logprobs": item.logprobs_field}
        if item.is_reasoning:
            kind, more = "response.reasoning_text.done", {}
        yield self._make_event(kind, **item.event_fields, text=item.text, **more)
        yield self._make_event(
            "response.content_part.done", **item.event_fields, part=item.content_part()
        )
        yield self._item_event("done", item)

    def _item_event(self, event_suffix: str, item: TextItem | CallItem) -> ResponseEvent:
        kind = f"response.output_item.{event_suffix}"
        return self._make_event(kind, output_index=item.index, item=item.as_dict())

    def _response_object(
        self, status: str, usage: Usage | None = None, error: dict[str, Any] | None = None
    ) -> bytes:
        items = [item.as_dict() for item in self._items]
        return self._response.to_json(status, items, usage, error)

    def _final_event(self, kind: str, response_json: bytes) -> ResponseEvent:
        self._final_response_json = response_json
        return self._response_event(kind, response_json)

    def _response_event(self, kind: str, response_json: bytes) -> ResponseEvent:
        number = self._next_sequence_number()
        start = f'{{"type":"{kind}","sequence_number":{number},"response":'
        return kind, b"%b%b}" % (start.encode(), response_json)

    def _make_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return kind, encode_json(
            {"type": kind, "sequence_number": self._next_sequence_number(), **fields}
        )

    def _next_sequence_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number
