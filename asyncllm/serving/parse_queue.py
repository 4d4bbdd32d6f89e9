"""ParseQueue and RequestStartQueue: bound the event loop's time for parsing and new requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MAX_EVENTS_PER_PARSE_TURN = 64
"""Maximum number of events that a connection parses before it lets others run. An event takes 5 to
15 microseconds."""

MIN_PAUSE_SECONDS = 0.004
"""Minimum number of seconds between two parse turns, of any connections."""

PAUSE_TO_BUSY_RATIO = 4
"""Minimum pause after a parse turn, as a multiple of the turn's duration. So parse turns take at
most a fifth of the event loop's time."""

MAX_EARNED_BYTES_PER_SECOND = 1 << 19
"""Maximum number of counted bytes that a connection earns back per second: those of some 60 small
receives."""

MAX_SHARED_BYTES_PER_SECOND = 1 << 23
"""Maximum number of counted bytes that all connections together earn back per second: those of some
900 small receives, which take a twentieth of the event loop's time, or of 8,192 events, which take
up to an eighth."""

MAX_SHARED_BYTES = 1 << 20
"""Maximum number of counted bytes that all connections together earn back at once: those of some
110 small receives, which take 7 ms, or of 1,024 events, which take up to 15."""


class ParseQueue:
    """Two queues of connections that wait for their next parse turn: those whose bodies or messages
    hold memory, for which others may wait, and all others. The queues alternate, so that the few
    that hold memory do not wait behind many.

    In a parse turn, one connection parses a limited number of events. A connection takes its first
    turn as soon as it receives data. With data left after that, the connection waits in this queue,
    in order of arrival, so that neither one connection nor many block the loop.

    A connection that receives little at a time does not wait here: with time, it earns back bytes
    that count towards its next turn. They come from a store that all connections share, and each
    earns at a rate that falls with the store's level. So many connections earn no more than the
    store gains, and those that need less than an equal share earn what they need.
    """

    def __init__(self) -> None:
        self._next_queue: dict[Callable[[], None], None] = {}
        self._queue_after_next: dict[Callable[[], None], None] = {}
        self._claim_queue, self._other_queue = self._next_queue, self._queue_after_next
        self._timer: asyncio.TimerHandle | None = None
        self._next_turn_at = 0.0
        self._num_shared_bytes = float(MAX_SHARED_BYTES)
        self._shared_bytes_at = 0.0

    def earn_bytes(self, max_bytes: float, seconds: float, now: float) -> float:
        """Earn back bytes that a connection has received; returns their number.

        Args:
            max_bytes: maximum number of bytes to earn.
            seconds: time in which the connection earns them.
            now: the event loop's time.
        """
        gained = MAX_SHARED_BYTES_PER_SECOND * (now - self._shared_bytes_at)
        shared = min(MAX_SHARED_BYTES, self._num_shared_bytes + gained)
        rate = MAX_EARNED_BYTES_PER_SECOND * shared / MAX_SHARED_BYTES
        earned = min(max_bytes, rate * seconds, shared)
        self._num_shared_bytes, self._shared_bytes_at = shared - earned, now
        return earned

    def add(self, turn_callback: Callable[[], None], has_claim: bool = False) -> None:
        """Queue a connection.

        Args:
            turn_callback: function that is called when the connection's turn comes.
            has_claim: whether the connection's body or message holds memory.
        """
        queue = self._claim_queue if has_claim else self._other_queue
        queue[turn_callback] = None
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._next_turn_at, self._begin_next_turn)

    def discard(self, turn_callback: Callable[[], None]) -> None:
        self._claim_queue.pop(turn_callback, None)
        self._other_queue.pop(turn_callback, None)

    def _begin_next_turn(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if queue := self._next_queue or self._queue_after_next:
                self._next_queue, self._queue_after_next = self._queue_after_next, self._next_queue
                turn_callback = next(iter(queue))
                del queue[turn_callback]
                turn_callback()
        finally:
            pause = max(MIN_PAUSE_SECONDS, PAUSE_TO_BUSY_RATIO * (loop.time() - began))
            self._next_turn_at = loop.time() + pause
            is_waiting = self._claim_queue or self._other_queue
            self._timer = (
                loop.call_at(self._next_turn_at, self._begin_next_turn) if is_waiting else None
            )


MAX_REQUEST_STARTS_PER_ITERATION = 4
"""Maximum number of requests that start in one iteration of the event loop. Starting one takes
about a millisecond."""


class RequestStartQueue:
    """Two queues of requests that wait to start: GET requests, and all others. The queues
    alternate, so that a health check does not wait behind hundreds of prompts; each keeps the order
    of arrival.

    A loop that starts hundreds of requests at once serves no stream meanwhile. A request waits for
    at least one iteration of the loop, because only then does the server notice a client that
    closed its connection right after it sent the request.
    """

    def __init__(self) -> None:
        self._waiting_gets: deque[tuple[asyncio.Future[None], Callable[[], bool]]] = deque()
        self._waiting_others: deque[tuple[asyncio.Future[None], Callable[[], bool]]] = deque()
        self._next_queue, self._queue_after_next = self._waiting_gets, self._waiting_others

    async def wait(self, method: str, is_client_gone: Callable[[], bool]) -> None:
        """Wait until the request may start: at least one iteration of the event loop.

        Args:
            method: HTTP method of the request.
            is_client_gone: function that returns whether the client has gone. If so, the request
                does not count among those that start in the iteration.
        """
        loop = asyncio.get_running_loop()
        if not (self._waiting_gets or self._waiting_others):
            loop.call_soon(self._start_requests)
        begin_future = loop.create_future()
        (self._waiting_gets if method == "GET" else self._waiting_others).append(
            (begin_future, is_client_gone)
        )
        await begin_future

    def _start_requests(self) -> None:
        num_begun = 0
        while num_begun < MAX_REQUEST_STARTS_PER_ITERATION and (
            queue := self._next_queue or self._queue_after_next
        ):
            self._next_queue, self._queue_after_next = self._queue_after_next, self._next_queue
            begin_future, is_client_gone = queue.popleft()
            if not begin_future.done():
                begin_future.set_result(None)
                num_begun += not is_client_gone()
        if self._waiting_gets or self._waiting_others:
            asyncio.get_running_loop().call_soon(self._start_requests)
