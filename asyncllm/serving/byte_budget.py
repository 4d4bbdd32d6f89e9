"""ByteBudget: bounds the bytes that many connections hold in memory together."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

BYTES_PER_SECOND = 1 << 20
"""Bytes of a claim that count as a second of waiting: claims are granted in the order of their
arrival, each of them later by its size."""

PACE_SECONDS = 2.0
MIN_PACE_BYTES = 1 << 16
"""Minimum number of bytes that have to come in PACE_SECONDS while other claims wait."""


class ByteClaim:
    """A connection's part of a ByteBudget, made by ``ByteBudget.claim``.

    Attributes:
        size: number of bytes.
        granted: whether the bytes may be held; until then the claim waits.
        released: whether the bytes were returned, or are no longer waited for.
    """

    __slots__ = ("_budget", "_checked", "_on_grant", "granted", "released", "size")

    def __init__(self, budget: ByteBudget, size: int, on_grant: Callable[[], object]) -> None:
        self._budget = budget
        self._on_grant = on_grant
        self._checked: tuple[float, int] | None = None
        self.size = size
        self.granted = self.released = False

    def grant(self) -> None:
        self.granted = True
        self._on_grant()

    def is_too_slow(self, num_received: int) -> bool:
        """Whether the claim's bytes come so slowly that they hold others up. The holder asks at
        least every ``PACE_SECONDS``, from the grant until all bytes have come.

        Args:
            num_received: number of bytes that have come since the claim was made.
        """
        now = time.monotonic()
        if self._checked is None or not self._budget.num_waiting:
            self._checked = now, num_received
        checked_at, num_before = self._checked
        if now - checked_at < PACE_SECONDS:
            return False
        self._checked = now, num_received
        return num_received - num_before < MIN_PACE_BYTES

    def release(self) -> None:
        """Return the bytes, or stop waiting for them. Idempotent."""
        if not self.released:
            self.released = True
            self._budget.release(self)


class ByteBudget:
    """Budget of bytes. A claim waits for those that came before it, and for smaller ones that come
    a little later, so that none starves.

    Args:
        num_bytes: maximum number of bytes of all granted claims. A larger claim is granted alone.

    Attributes:
        num_waiting: number of claims that wait.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_waiting = 0
        self._num_bytes = self._num_free = num_bytes
        self._waiting: list[tuple[float, int, ByteClaim]] = []
        self._numbers = itertools.count()

    def claim(self, size: int, on_grant: Callable[[], object]) -> ByteClaim:
        """Claim bytes; ``on_grant`` is called once they may be held, perhaps at once."""
        claim = ByteClaim(self, min(size, self._num_bytes), on_grant)
        turn = time.monotonic() + claim.size / BYTES_PER_SECOND
        heapq.heappush(self._waiting, (turn, next(self._numbers), claim))
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
                claim.grant()
