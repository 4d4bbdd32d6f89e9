"""ByteBudget: bounds the bytes that many connections hold in memory together."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

BYTES_PER_SECOND = 1 << 20
"""Bytes of a claim that count as a second of later arrival. Claims are granted in the order of
their arrival, so a large claim lets small ones pass that come a little after it."""

PACE_SECONDS = 2.0
"""Seconds between two checks of a claim's pace."""

MIN_PACE_BYTES = 1 << 16
"""Minimum number of bytes that have to come in PACE_SECONDS while other claims wait."""


class ByteClaim:
    """A connection's part of a ByteBudget, made by ``ByteBudget.claim``.

    Attributes:
        size: number of bytes.
        on_grant: called when the bytes are granted.
        granted: whether the claim has its bytes; until then it waits.
        released: whether the claim has returned its bytes, or has stopped waiting.
    """

    __slots__ = ("_budget", "_last_check", "granted", "on_grant", "released", "size")

    def __init__(self, budget: ByteBudget, size: int, on_grant: Callable[[], object]) -> None:
        self._budget = budget
        self.on_grant = on_grant
        self._last_check: tuple[float, int] | None = None
        self.size = size
        self.granted = self.released = False

    def is_too_slow(self, num_received: int) -> bool:
        """Whether the claim's bytes come too slowly while other claims wait. The caller asks at
        least every ``PACE_SECONDS``, from the grant until all bytes have come.

        Args:
            num_received: number of bytes that have come since the claim was made.
        """
        now = time.monotonic()
        if self._last_check is None or not self._budget.num_waiting:
            self._last_check = now, num_received
        checked_at, num_before = self._last_check
        if now - checked_at < PACE_SECONDS:
            return False
        self._last_check = now, num_received
        return num_received - num_before < MIN_PACE_BYTES

    def release(self) -> None:
        """Return the bytes to the budget, or stop waiting for them. Idempotent."""
        if not self.released:
            self.released = True
            self._budget.release(self)


class ByteBudget:
    """Budget of bytes, which waiting claims get in the order of their arrival, small claims a
    little earlier. So no claim starves.

    Args:
        num_bytes: maximum number of bytes of all granted claims. A larger claim is granted alone.

    Attributes:
        num_waiting: number of claims that wait.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_waiting = 0
        self._num_bytes = self._num_free = num_bytes
        self._waiting: list[tuple[float, int, ByteClaim]] = []
        self._arrival_numbers = itertools.count()

    def claim(self, size: int, on_grant: Callable[[], object]) -> ByteClaim:
        """Claim bytes. ``on_grant`` is called when they are granted, perhaps before this
        returns."""
        claim = ByteClaim(self, min(size, self._num_bytes), on_grant)
        rank = time.monotonic() + claim.size / BYTES_PER_SECOND
        heapq.heappush(self._waiting, (rank, next(self._arrival_numbers), claim))
        self.num_waiting += 1
        self._grant_next()
        return claim

    def release(self, claim: ByteClaim) -> None:
        """Take back the bytes of a claim; see ``ByteClaim.release``."""
        if claim.granted:
            self._num_free += claim.size
        else:
            self.num_waiting -= 1
        self._grant_next()

    def _grant_next(self) -> None:
        while self._waiting:
            claim = self._waiting[0][-1]
            if not claim.released and claim.size > self._num_free:
                return
            heapq.heappop(self._waiting)
            if not claim.released:
                self.num_waiting -= 1
                self._num_free -= claim.size
                claim.granted = True
                claim.on_grant()
