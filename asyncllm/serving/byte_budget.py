"""ByteBudget: bounds the bytes that many connections hold in memory together."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

LARGE_CLAIM_DELAY_BYTES_PER_SECOND = 1 << 20
"""A claim of this many bytes is queued as if it had arrived one second later, and other claims in
proportion to their bytes. So small claims overtake a large one that arrived shortly before them."""

RATE_CHECK_SECONDS = 2.0
"""Seconds between two checks of how fast a claim's body or message arrives."""

MIN_BYTES_PER_RATE_CHECK = 1 << 16
"""Minimum number of bytes that a client sends per RATE_CHECK_SECONDS while other claims wait."""


class ByteClaim:
    """One connection's reservation in a ByteBudget, made by ``ByteBudget.claim``.

    Attributes:
        num_bytes: number of bytes.
        on_grant: called when the bytes are granted.
        is_granted: whether the claim has its bytes; until then it waits.
        is_released: whether the claim has returned its bytes, or has stopped waiting.
    """

    __slots__ = ("_budget", "_last_check", "is_granted", "is_released", "num_bytes", "on_grant")

    def __init__(self, budget: ByteBudget, num_bytes: int, on_grant: Callable[[], object]) -> None:
        self._budget = budget
        self.on_grant = on_grant
        self._last_check: tuple[float, int] | None = None
        self.num_bytes = num_bytes
        self.is_granted = self.is_released = False

    def is_too_slow(self, num_received: int) -> bool:
        """Whether the client sends its data too slowly while other claims wait. To be called
        at least every ``RATE_CHECK_SECONDS``, from the grant until all bytes are received.

        Args:
            num_received: number of bytes received since the claim was made.
        """
        now = time.monotonic()
        if self._last_check is None or not self._budget.num_waiting:
            self._last_check = now, num_received
        checked_at, num_before = self._last_check
        if now - checked_at < RATE_CHECK_SECONDS:
            return False
        self._last_check = now, num_received
        return num_received - num_before < MIN_BYTES_PER_RATE_CHECK

    def release(self) -> None:
        """Return the bytes to the budget, or stop waiting for them. Idempotent."""
        if not self.is_released:
            self.is_released = True
            self._budget.release(self)


class ByteBudget:
    """Budget of bytes, granted to claims in order of arrival. Small claims overtake only large ones
    that arrived shortly before them, so no claim starves.

    Args:
        num_bytes: maximum number of bytes of all granted claims. A larger claim is granted alone.

    Attributes:
        num_waiting: number of claims that wait.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_waiting = 0
        self._num_bytes = self._num_free_bytes = num_bytes
        self._waiting_claims: list[tuple[float, int, ByteClaim]] = []
        self._arrival_numbers = itertools.count()

    def claim(self, num_bytes: int, on_grant: Callable[[], object]) -> ByteClaim:
        """Claim bytes. ``on_grant`` is called when they are granted, perhaps before this
        returns."""
        claim = ByteClaim(self, min(num_bytes, self._num_bytes), on_grant)
        rank = time.monotonic() + claim.num_bytes / LARGE_CLAIM_DELAY_BYTES_PER_SECOND
        heapq.heappush(self._waiting_claims, (rank, next(self._arrival_numbers), claim))
        self.num_waiting += 1
        self._grant_next()
        return claim

    def release(self, claim: ByteClaim) -> None:
        """Take back the bytes of a claim; see ``ByteClaim.release``."""
        if claim.is_granted:
            self._num_free_bytes += claim.num_bytes
        else:
            self.num_waiting -= 1
        self._grant_next()

    def _grant_next(self) -> None:
        while self._waiting_claims:
            claim = self._waiting_claims[0][-1]
            if not claim.is_released and claim.num_bytes > self._num_free_bytes:
                return
            heapq.heappop(self._waiting_claims)
            if not claim.is_released:
                self.num_waiting -= 1
                self._num_free_bytes -= claim.num_bytes
                claim.is_granted = True
                claim.on_grant()
