"""Turns: bounds the share of the event loop that goes to connections with much to parse."""

from __future__ import annotations

import asyncio
from typing import Protocol

EVENTS_PER_TURN = 64
"""Events that a connection may parse in one turn; one takes 5 to 15 microseconds."""

REST = 0.004
"""Least seconds between two turns."""

REST_FACTOR = 4
"""Least rest after a turn, as a multiple of its time. So turns take a fifth of the loop at most."""


class Connection(Protocol):
    def begin_turn(self) -> None: ...


class Turns:
    """Queue of one server's connections that have received more than a turn may parse.

    A connection parses what it receives at once, up to one turn. The rest waits here, behind the
    rest of every other connection, so that neither one connection nor many hold up the loop.
    """

    def __init__(self) -> None:
        self._waiting: dict[Connection, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: Connection) -> None:
        self._waiting[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REST, self._next)

    def discard(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if self._waiting:
                connection = next(iter(self._waiting))
                del self._waiting[connection]
                connection.begin_turn()
        finally:
            rest = max(REST, REST_FACTOR * (loop.time() - began))
            self._timer = loop.call_later(rest, self._next) if self._waiting else None
