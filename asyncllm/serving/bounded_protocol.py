"""BoundedProtocol: limits on a connection's parsing, and on a client that reads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from asyncllm.serving.connection_limits import ConnectionLimits
from asyncllm.serving.parse_queue import MAX_EVENTS_PER_PARSE_TURN, ParseQueue

MAX_BYTES_PER_PARSE_TURN = 1 << 16
"""Maximum number of bytes that a connection receives before it waits in the ParseQueue, less those
that it has earned back. The event loop takes 3 ms to receive, parse and decode a megabyte."""

MIN_COUNTED_BYTES = MAX_BYTES_PER_PARSE_TURN // 8
"""Minimum number of bytes that one call of ``data_received`` counts as. A call takes some 60
microseconds of the event loop, even for a single byte."""

BYTES_PER_EVENT = MAX_BYTES_PER_PARSE_TURN // MAX_EVENTS_PER_PARSE_TURN
"""Number of bytes that an event counts in addition to those received: as many events may come
before a parse turn as in one."""


class Timer:
    """Delayed call that can be cancelled. Starting a running timer does not postpone its call."""

    __slots__ = ("_call", "_seconds", "_timer_handle")

    def __init__(self, seconds: float, call: Callable[[], Any]) -> None:
        self._seconds = seconds
        self._call = call
        self._timer_handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer_handle is None:
            self._timer_handle = asyncio.get_running_loop().call_later(self._seconds, self._call)

    def stop(self) -> None:
        if self._timer_handle is not None:
            self._timer_handle.cancel()
            self._timer_handle = None


class BoundedProtocol(asyncio.Protocol):
    """Mixin of the HTTP and WebSocket protocols, with limits on parsing and on unread answers.

    Received data is parsed in bounded slices. The connection of a client that leaves its answer
    unread is closed.

    The transport pauses writing as soon as the kernel accepts no more data; a TLS transport pauses
    after 64 KiB. So no stream runs ahead of its client, and a client that reads nothing is noticed
    even if its answer is a single write.
    """

    limits: ClassVar[ConnectionLimits]
    parse_queue: ClassVar[ParseQueue]
    transport: asyncio.Transport

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._send_timer = Timer(self.limits.send_timeout, lambda: self.transport.abort())
        self._unparsed = bytearray()
        self._waits_for_parse_turn = False
        self._num_counted_bytes = 0.0
        self._received_at = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # A TLS transport pauses when its buffer reaches the limit; with 0 it would pause when
        # empty.
        transport.set_write_buffer_limits(high=1)
        if hasattr(transport, "max_size"):
            # asyncio receives up to 256 KiB at once by default: each connection that waits for its
            # parse turn would hold as much.
            transport.max_size = MAX_BYTES_PER_PARSE_TURN

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._count_receive(len(data))
        if self._waits_for_parse_turn:
            # uvicorn may have resumed reading, and TLS may deliver data after a pause.
            self.transport.pause_reading()
        elif self._num_counted_bytes > MAX_BYTES_PER_PARSE_TURN:
            self._queue_for_parse_turn()
        else:
            self._parse()
            self._num_counted_bytes += BYTES_PER_EVENT * self._num_parsed_events()

    def _count_receive(self, num_bytes: int) -> None:
        """Count received bytes, less what the connection has earned since its last receive."""
        now = asyncio.get_running_loop().time()
        self._num_counted_bytes -= self.parse_queue.earn_bytes(
            self._num_counted_bytes, now - self._received_at, now
        )
        self._num_counted_bytes += max(num_bytes, MIN_COUNTED_BYTES)
        self._received_at = now

    def _parse(self) -> None:
        """Parse received data, up to the limits of one parse turn."""
        raise NotImplementedError

    def _num_parsed_events(self) -> int:
        """Number of chunks or frames that the last call of ``_parse`` parsed."""
        raise NotImplementedError

    def _may_read(self) -> bool:
        """Whether the connection may read from its socket. Not called while the connection waits
        for its parse turn."""
        raise NotImplementedError

    def _has_claim(self) -> bool:
        """Whether the connection receives a body or message that holds memory of a budget."""
        raise NotImplementedError

    def _pop_unparsed_bytes(self, max_bytes: int) -> bytes:
        data = bytes(self._unparsed[:max_bytes])
        del self._unparsed[:max_bytes]
        return data

    def _queue_for_parse_turn(self) -> None:
        self._waits_for_parse_turn = True
        self.transport.pause_reading()
        self.parse_queue.add(self._begin_parse_turn, self._has_claim())

    def _begin_parse_turn(self) -> None:
        self._waits_for_parse_turn = False
        self._num_counted_bytes = 0.0
        if not self.transport.is_closing():
            self._resume_reading()
            self._parse()

    def _resume_reading(self) -> None:
        if not self._waits_for_parse_turn and self._may_read():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._send_timer.stop()
        self.parse_queue.discard(self._begin_parse_turn)
