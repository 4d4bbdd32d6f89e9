"""Turns: bounds the event loop's time for connections with much data to parse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVENTS_PER_TURN = 64
"""Maximum number of events that a connection parses in one turn. An event takes 5 to 15
microseconds."""

MIN_PAUSE_SECONDS = 0.004
"""Minimum number of seconds between two turns."""

PAUSE_FACTOR = 4
"""Minimum pause after a turn, as a multiple of the turn's duration. So turns take at most a fifth
of the loop's time."""


class Turns:
    """Queue of the connections with more unparsed data than one turn may parse.

    A connection parses one turn's worth of data as soon as it is received. For the rest,
    connections wait here in order of arrival, so that neither one connection nor many block the
    loop.
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
