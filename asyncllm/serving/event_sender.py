"""EventSender: sends an answer in server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio

from asyncllm.errors import AsyncLLMError
from asyncllm.serving.client import ClientGoneError, task_group
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.protocol_error import ProtocolError, to_protocol_error
from asyncllm.serving.serving import ServingContext
from asyncllm.stream import TokenStream

PING_COMMENT = b": ping\n\n"
"""Comment that clients ignore and proxies count as traffic."""


class EventSender:
    """Sender of a stream's server-sent events, and of comments while no event comes.

    The HTTP answer starts with the first event or comment. An error before it (for a prompt that is
    too long, say) is answered with the error's HTTP status.

    Args:
        first_events: events to send before all others.
    """

    def __init__(self, exchange: Exchange, first_events: bytes) -> None:
        self._exchange = exchange
        self._first_events = first_events
        self._start_lock = anyio.Lock()
        self._has_started = False
        self._has_sent_since_check = False

    def send(self, data: bytes) -> Awaitable[None]:
        self._has_sent_since_check = True
        return self._exchange.send_events(data) if self._has_started else self._start(data)

    async def _start(self, data: bytes) -> None:
        """Send the first events and then ``data``; concurrent calls wait until both are sent."""
        async with self._start_lock:
            if not self._has_started:
                await self._exchange.start_events()
                data, self._first_events = self._first_events + data, b""
            await self._exchange.send_events(data)
            self._has_started = True

    async def keep_alive(self, seconds: float) -> None:
        """Send a comment before ``seconds`` pass without an event, until the client is gone.

        Sending an event only sets a flag, which is read here. A timeout around each read of the
        next event would cost several times as much.
        """
        with suppress(OSError):
            while True:
                await anyio.sleep(seconds / 2)
                if not self._has_sent_since_check:
                    await self.send(PING_COMMENT)
                self._has_sent_since_check = False


@asynccontextmanager
async def open_event_sender(
    server_context: ServingContext,
    exchange: Exchange,
    streams: Sequence[TokenStream],
    first_events: bytes,
    write_error: Callable[[ProtocolError], bytes],
) -> AsyncIterator[EventSender]:
    """Context manager that yields the sender of an answer's events; its exit ends the answer.

    Args:
        first_events: events to send before all others.
        write_error: function that writes an error as events, for an error after the first event.

    Raises:
        ProtocolError, AsyncLLMError: for an error before anything was sent.
        ClientGoneError: at the end of the block, if the client has gone meanwhile.
    """
    sender = EventSender(exchange, first_events)
    del first_events  # Free them once they are sent: they may repeat a long request.
    server_context.frame_pacer.begin_response(len(streams))
    try:
        keep_alive = partial(sender.keep_alive, server_context.ping_interval)
        async with abort_on_disconnect(exchange, streams, keep_alive):
            yield sender
    except (ProtocolError, AsyncLLMError) as error:
        if not exchange.has_begun_answer:
            raise
        await sender.send(write_error(to_protocol_error(error, exchange.field_by_engine_param)))
    finally:
        server_context.frame_pacer.end_response(len(streams))
    await exchange.end_event_stream()


@asynccontextmanager
async def abort_on_disconnect(
    exchange: Exchange,
    streams: Sequence[TokenStream],
    background_task: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> AsyncIterator[None]:
    """Abort the streams when the client closes its connection, or the block is left.

    Args:
        background_task: coroutine function that runs until the end of the block.

    Raises:
        ClientGoneError: at the end of the block, if the client has gone meanwhile.
    """
    is_gone = False

    async def abort_when_gone() -> None:
        nonlocal is_gone
        await exchange.wait_for_disconnect()
        is_gone = True
        for stream in streams:
            stream.abort()

    try:
        async with task_group() as tasks:
            tasks.start_soon(abort_when_gone)
            if background_task is not None:
                tasks.start_soon(background_task)
            yield
            tasks.cancel_scope.cancel()
    except Exception:
        if not is_gone:
            raise
    finally:
        for stream in streams:
            stream.close()
    if is_gone:
        raise ClientGoneError
