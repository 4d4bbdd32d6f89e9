"""ParseQueue and RequestStartQueue: bound the event loop's time for parsing and new requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

EVENTS_PER_TURN = 64
"""Maximum number of events that a connection parses in one turn. An event takes 5 to 15
microseconds."""

MIN_PAUSE_SECONDS = 0.004
"""Minimum number of seconds between two turns."""

PAUSE_FACTOR = 4
"""Minimum pause after a turn, as a multiple of the turn's duration. So turns take at most a fifth
of the loop's time."""


class ParseQueue:
    """Queue of the connections with more unparsed data than one turn may parse.

    A connection parses one turn's worth of data as soon as it is received. For the rest of its
    data, a connection waits in this queue, in order of arrival, so that neither one connection nor
    many block the loop.
    """

    def __init__(self) -> None:
        self._connections: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, begin_turn: Callable[[], None]) -> None:
        """Queue a connection for its next slice of the event loop's time; ``begin_turn`` is called
        when the slice begins."""
        self._connections[begin_turn] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MIN_PAUSE_SECONDS, self._next_turn)

    def discard(self, begin_turn: Callable[[], None]) -> None:
        self._connections.pop(begin_turn, None)

    def _next_turn(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if self._connections:
                begin_turn = next(iter(self._connections))
                del self._connections[begin_turn]
                begin_turn()
        finally:
            pause = max(MIN_PAUSE_SECONDS, PAUSE_FACTOR * (loop.time() - began))
            self._timer = loop.call_later(pause, self._next_turn) if self._connections else None


STARTS_PER_ITERATION = 4
"""Maximum number of requests that begin in one iteration of the event loop. To begin one takes
about a millisecond."""


class RequestStartQueue:
    """Two queues of the requests that begin: reads (GET), and those that may generate. They
    alternate, so that a health check does not wait behind hundreds of prompts; each keeps the order
    of arrival.

    A loop that begins hundreds of requests at once serves no stream meanwhile. A request waits for
    at least one iteration of the loop, because only then does the server notice a client that
    closed its connection right after it sent the request.
    """

    def __init__(self) -> None:
        self._reads: deque[tuple[asyncio.Future[None], Callable[[], bool]]] = deque()
        self._others: deque[tuple[asyncio.Future[None], Callable[[], bool]]] = deque()
        self._next, self._after_next = self._reads, self._others

    async def wait(self, method: str, is_gone: Callable[[], bool]) -> None:
        """Wait until the request may begin: for one iteration of the loop, or for its turn.

        Args:
            method: HTTP method of the request.
            is_gone: function that returns whether the client has gone; its request then takes no
                turn from other requests.
        """
        loop = asyncio.get_running_loop()
        if not (self._reads or self._others):
            loop.call_soon(self._next_iteration)
        begins = loop.create_future()
        (self._reads if method == "GET" else self._others).append((begins, is_gone))
        await begins

    def _next_iteration(self) -> None:
        num_begun = 0
        while num_begun < STARTS_PER_ITERATION and (queue := self._next or self._after_next):
            self._next, self._after_next = self._after_next, self._next
            begins, is_gone = queue.popleft()
            if not begins.done():
                begins.set_result(None)
                num_begun += not is_gone()
        if self._reads or self._others:
            asyncio.get_running_loop().call_soon(self._next_iteration)
