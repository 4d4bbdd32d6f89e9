"""Turns: bounds the event loop's time for connections with much to parse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVENTS_PER_TURN = 64
"""Maximum number of events that a connection parses in one turn. An event takes 5 to 15
microseconds."""

REST = 0.004
"""Minimum number of seconds between two turns."""

REST_FACTOR = 4
"""Minimum rest after a turn, as a multiple of the turn's time. So turns take at most a fifth of the
loop's time."""


class Turns:
    """Queue of one server's connections that have received more than a turn may parse.

    A connection parses one turn's worth of data as soon as it is received. The rest waits here in
    the order of arrival, so that neither one connection nor many hold up the loop.
    """

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, begin_turn: Callable[[], None]) -> None:
        """Call a connection's ``begin_turn`` when its turn has come."""
        self._waiting[begin_turn] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REST, self._next_turn)

    def discard(self, begin_turn: Callable[[], None]) -> None:
        self._waiting.pop(begin_turn, None)

    def _next_turn(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if self._waiting:
                begin_turn = next(iter(self._waiting))
                del self._waiting[begin_turn]
                begin_turn()
        finally:
            rest = max(REST, REST_FACTOR * (loop.time() - began))
            self._timer = loop.call_later(rest, self._next_turn) if self._waiting else None
