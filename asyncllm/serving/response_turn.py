"""ResponseTurn: one response from request to end, for HTTP, SSE and WebSocket."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import anyio

from asyncllm.outputs import Delta
from asyncllm.serving.byte_budget import RATE_CHECK_SECONDS, ByteClaim
from asyncllm.serving.client import Client
from asyncllm.serving.response_events import ResponseEvent, ResponseEvents
from asyncllm.serving.response_object import ResponseObject
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.response_store import (
    Conversation,
    ResponseStore,
    StoredResponse,
    response_not_found_error,
)
from asyncllm.serving.serving import (
    MIN_WORKER_JSON_BYTES,
    WRITE_PARSE_SPEED_RATIO,
    ServingContext,
)
from asyncllm.serving.token_logprobs import BYTES_PER_ENTRY, num_logprobs_bytes
from asyncllm.stream import TokenStream

CONVERT_PARSE_SPEED_RATIO = 32
"""Bytes of a conversation (by ``estimate_memory_bytes``) that are converted to chat messages in the
time of parsing one byte of JSON. A short message of about 360 bytes takes 3 microseconds, a tool
call of 730 takes 6, and its arguments the time of their own bytes of JSON besides."""

SendEvents = Callable[[Iterable[ResponseEvent]], Awaitable[None]]


@dataclass(eq=False, repr=False)
class ResponseTurn:
    """One response, made by ``begin``.

    Attributes:
        stream: stream of the answer.
        events: writer of the response's events.
    """

    stream: TokenStream
    events: ResponseEvents
    _server_context: ServingContext
    _client: Client
    _conversation: Conversation
    _store: ResponseStore
    _conversation_claim: ByteClaim = field(init=False)
    _request_claim: ByteClaim = field(init=False)
    _logprobs_claim: ByteClaim = field(init=False)

    @classmethod
    async def begin(
        cls,
        server_context: ServingContext,
        client: Client,
        request: ResponseRequest,
        num_request_bytes: int,
        connection_store: ResponseStore,
    ) -> Self:
        """Submit a request, on the worker thread if it is long. The caller calls ``release`` at the
        end of the answer.

        Args:
            client: the request's client, which may continue only its owner's responses.
            num_request_bytes: number of bytes of the request's JSON.
            connection_store: this connection's responses with ``store=false``.

        Raises:
            ProtocolError, AsyncLLMError: if the request cannot be served.
        """
        owner, history = client.owner, Conversation()
        if (previous_id := request.previous_response_id) is not None:
            stored = connection_store.get(owner, previous_id)
            stored = stored or server_context.response_store.get(owner, previous_id)
            if stored is None:
                raise response_not_found_error(previous_id, "previous_response_id")
            history = stored.conversation

        def submit() -> Self:
            engine = server_context.engine
            model = server_context.resolve_model_name(request.model)
            conversation = history.with_messages(request.messages)
            stream = request.submit(
                engine, conversation.messages, server_context.request_options(owner)
            )
            defaults = engine.model_config.generation_defaults or {}
            response = ResponseObject(request, model, defaults)
            events = ResponseEvents(request, response, engine.tokenizer.id_to_text_and_bytes)
            store = server_context.response_store if request.should_store else connection_store
            return cls(stream, events, server_context, client, conversation, store)

        with ExitStack() as claims:
            # The request holds its history from here on, even if the store drops it.
            history_claim = server_context.claim_conversation_bytes(history.memory_bytes)
            claims.callback(history_claim.release)
            num_bytes = num_request_bytes + history.num_argument_characters
            num_bytes += history.memory_bytes // CONVERT_PARSE_SPEED_RATIO
            turn = await server_context.run_json_job(submit, num_bytes, client)
            claims.callback(turn.stream.abort)
            # Claim the rest only after the engine has checked the request: an invalid request must
            # not take memory from others.
            history_claim.release()
            num_bytes = turn._conversation.memory_bytes
            turn._conversation_claim = server_context.claim_conversation_bytes(num_bytes)
            claims.callback(turn._conversation_claim.release)
            turn._request_claim = server_context.claim_answer_bytes(turn.events.num_repeated_bytes)
            claims.callback(turn._request_claim.release)
            num_bytes = server_context.max_packed_logprobs_bytes(request)
            turn._logprobs_claim = server_context.claim_packed_logprobs_bytes(num_bytes)
            claims.pop_all()  # The turn releases them from now on.
        return turn

    def release(self) -> None:
        """Release all memory claimed for the answer, once the client has read it."""
        self.release_request_bytes()
        self._conversation_claim.release()
        self._logprobs_claim.release()

    def release_request_bytes(self) -> None:
        """Release the memory claimed for the fields of the request that the answer repeats."""
        self._request_claim.release()

    async def collect_events(self, events: Iterable[ResponseEvent]) -> list[ResponseEvent]:
        """Make events that contain the whole response; long ones on the worker thread."""
        num_bytes = self.events.num_repeated_bytes // WRITE_PARSE_SPEED_RATIO
        return await self._server_context.run_json_job(
            lambda: list(events), num_bytes + self.events.num_logprobs_bytes, self._client
        )

    async def run(
        self, send: SendEvents | None, *, before_end: Callable[[], None] = lambda: None
    ) -> None:
        """Send the events after ``created``, and store the response.

        Args:
            send: sends events; None if the answer is only the whole response.
            before_end: called before the last events are sent, because the next request may arrive
                while they are being sent.

        Raises:
            AsyncLLMError: if the request failed; or any error of ``send``.
        """
        events, pacer = self.events, self._server_context.frame_pacer
        events.has_delta_logprobs = send is not None
        self.stream._drop_read_output()  # ``events`` has what the last events repeat.
        self.stream._drop_prompt()
        async for delta in self.stream:
            if events.should_generate:
                await self._send_delta(send, delta)
                if delta.finish_reason is None and (pause := pacer.pause_seconds) > 0:
                    # Tokens that arrive meanwhile are merged into one event.
                    await anyio.sleep(pause)
        stream, context = self.stream, self._server_context
        async with context.claimed_logprobs_bytes(events.num_logprobs_bytes, self._client.owner):
            final_events = await self.collect_events(
                events.completed_events(stream.finish_reason, stream.usage)
            )
            self._store_response()
            before_end()
            if send is None:
                return
            if not events.num_logprobs_bytes:
                await send(final_events)
                return
            await self._send_with_logprobs(send, final_events)
        while final_events:
            # Others have waited for this memory: wait behind them, without the JSON.
            num_bytes = events.num_logprobs_bytes
            async with context.claimed_logprobs_bytes(num_bytes, self._client.owner):
                await context.run_json_job(events.encode_logprobs, num_bytes, self._client)
                await self._send_with_logprobs(send, final_events)

    async def _send_delta(self, send: SendEvents | None, delta: Delta) -> None:
        """Send the events of a delta; long ones are made on the worker thread."""
        events = self.events.delta_events(delta)
        num_bytes = num_logprobs_bytes(delta.logprobs, BYTES_PER_ENTRY)
        if send is None:
            deque(events, maxlen=0)
        elif num_bytes < MIN_WORKER_JSON_BYTES:
            await send(events)
        else:  # Many tokens are merged where the client reads slowly.
            async with self._server_context.claimed_chunk(
                partial(list, events), _count_bytes, num_bytes, self._client
            ) as delta_events:
                await send(delta_events)

    def _store_response(self) -> None:
        """Store the response. Only the store refers to it afterwards, and frees it when it drops
        the response."""
        events = self.events
        answer = (events.assistant_message(),) if events.should_generate else ()
        # A response with ``store=false`` can be continued, but not read again.
        is_readable = self._store is self._server_context.response_store
        body = events.response_json if is_readable else b""
        stored = StoredResponse(self._conversation.with_messages(answer), body)
        self._store.add(self._client.owner, events.id, stored)

    async def _send_with_logprobs(self, send: SendEvents, unsent: list[ResponseEvent]) -> None:
        """Send the remaining events one by one, because each repeats the log-probabilities. Stop
        after a slow one if others wait for memory; the caller then claims it anew."""
        budget, began_at = self._server_context.logprobs_budget, time.monotonic()
        while unsent:
            await send((self.events.insert_logprobs(unsent.pop(0)),))
            is_slow = time.monotonic() - began_at >= RATE_CHECK_SECONDS
            if unsent and is_slow and budget.num_waiting:
                self.events.free_logprobs()
                return


def _count_bytes(events: Iterable[ResponseEvent]) -> int:
    """Memory of the events. In a ``str``, one emoji makes every character take four bytes."""
    return sum(sys.getsizeof(data) for _, data in events)
