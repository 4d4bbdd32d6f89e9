"""ResponseTurn: one response from request to end, for HTTP, SSE and WebSocket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Self

import anyio

from asyncllm.serving.byte_budget import ByteClaim
from asyncllm.serving.response_events import Event, ResponseEvents
from asyncllm.serving.response_object import ResponseObject
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.response_store import (
    Conversation,
    ResponseStore,
    StoredResponse,
    response_not_found,
)
from asyncllm.serving.serving import Serving
from asyncllm.stream import TokenStream

MEMORY_PER_JSON_BYTE = 32
"""Bytes of a conversation in memory that are converted in the time of reading one byte of JSON. A
short message has about 360 bytes, and is converted in 3 microseconds."""

WRITTEN_PER_READ_BYTE = 10
"""Bytes of JSON that are written in the time that reading one byte takes. Events with the whole
response repeat the request's texts and tools."""

SendEvents = Callable[[Iterable[Event]], Awaitable[None]]


@dataclass(eq=False, repr=False)
class ResponseTurn:
    """One response, made by ``begin``.

    Attributes:
        stream: stream of the answer.
        events: writer of its events.
    """

    stream: TokenStream
    events: ResponseEvents
    _serving: Serving
    _owner: str
    _conversation: Conversation
    _store: ResponseStore
    _size: int
    _claim: ByteClaim

    @classmethod
    async def begin(
        cls,
        serving: Serving,
        owner: str,
        request: ResponseRequest,
        size: int,
        connection_store: ResponseStore,
    ) -> Self:
        """Submit a request; a long conversation is checked on the worker thread. The caller calls
        ``release`` at the end of the answer.

        Args:
            owner: owner of the request, and of the responses that it may continue.
            size: number of bytes of the request's JSON.
            connection_store: store of one connection, for responses with ``store=false``.

        Raises:
            ProtocolError, AsyncLLMError: if it cannot be served.
        """
        history = Conversation()
        if (previous_id := request.previous_response_id) is not None:
            stored = connection_store.get(owner, previous_id)
            stored = stored or serving.store.get(owner, previous_id)
            if stored is None:
                raise response_not_found(previous_id, "previous_response_id")
            history = stored.conversation
        claim = serving.claim_answer(size)

        def submit() -> Self:
            engine = serving.engine
            model = serving.model_name(request.model)
            conversation = history.extended_by(request.messages)
            stream = request.submit(engine, conversation.messages, serving.request_options(owner))
            defaults = engine.model_config.generation_defaults or {}
            response = ResponseObject(request, model, defaults)
            events = ResponseEvents(request, response, engine.tokenizer.id_to_text_and_bytes)
            store = serving.store if request.should_store else connection_store
            return cls(stream, events, serving, owner, conversation, store, size, claim)

        try:
            return await serving.run(submit, size + history.size // MEMORY_PER_JSON_BYTE)
        except BaseException:
            claim.release()
            raise

    def release(self) -> None:
        """Release the memory that the request claims, once the client has read its answer."""
        self._claim.release()

    async def serialize(self, events: Iterable[Event]) -> list[Event]:
        """Serialise events that contain the whole response; long ones on the worker thread."""
        return await self._serving.run(lambda: list(events), self._size // WRITTEN_PER_READ_BYTE)

    async def run(self, send: SendEvents, *, before_end: Callable[[], None] = lambda: None) -> None:
        """Send the events after ``created``, and store the response.

        Args:
            before_end: called before the last events are sent, because the next request may arrive
                while they are being sent.

        Raises:
            AsyncLLMError: if the request failed; or any error of ``send``.
        """
        events, pacer = self.events, self._serving.pacer
        generates = events.generates
        async for delta in self.stream:
            if generates:
                await send(events.delta(delta))
                if delta.finish_reason is None and (pause := pacer.pause) > 0:
                    # Tokens that arrive meanwhile are merged into one event.
                    await anyio.sleep(pause)
        stream = self.stream
        final_events = await self.serialize(events.completed(stream.finish_reason, stream.usage))
        turn = (events.assistant_message(),) if generates else ()
        # A response with ``store=false`` can be continued, but not read again.
        body = events.body if self._store is self._serving.store else ""
        stored = StoredResponse(self._conversation.extended_by(turn), body)
        self._store.add(self._owner, events.id, stored)
        before_end()
        await send(final_events)
