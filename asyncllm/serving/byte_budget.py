"""ByteBudget: bounds the bytes that many connections hold in memory together."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncllm.owner_lines import OwnerLines

LARGE_CLAIM_DELAY_BYTES_PER_SECOND = 1 << 20
"""A claim of this many bytes is queued as if it had arrived one second later, and other claims in
proportion to their bytes. So small claims overtake a large one that arrived shortly before them."""

RATE_CHECK_SECONDS = 2.0
"""Seconds between two checks of how fast a claim's body or message arrives."""

MIN_BYTES_PER_RATE_CHECK = 1 << 16
"""Minimum number of bytes that a client sends per RATE_CHECK_SECONDS, on average since other claims
began to wait."""

MAX_RATE_CHECKS = 4
"""Number of checks after which all bytes of a claim have to be received and parsed, if other claims
wait. So a claim of any size holds up others for about MAX_RATE_CHECKS * RATE_CHECK_SECONDS."""


class ByteClaim:
    """One connection's reservation in a ByteBudget, made by ``ByteBudget.claim``.

    Attributes:
        num_bytes: number of bytes.
        owner: owner of the connection.
        on_grant: called when the bytes are granted.
        is_granted: whether the claim has its bytes; until then it waits.
        is_released: whether the claim has returned its bytes, or has stopped waiting.
    """

    __slots__ = (
        "_budget",
        "_last_check",
        "_num_checks",
        "is_granted",
        "is_released",
        "num_bytes",
        "on_grant",
        "owner",
    )

    def __init__(
        self,
        budget: ByteBudget,
        num_bytes: int,
        on_grant: Callable[[], object],
        owner: str | None,
    ) -> None:
        self._budget = budget
        self.on_grant = on_grant
        self.owner = owner
        self._last_check: tuple[float, int] | None = None
        self._num_checks = 0
        self.num_bytes = num_bytes
        self.is_granted = self.is_released = False

    @property
    def min_bytes_per_check(self) -> int:
        """Number of bytes that the client sends per RATE_CHECK_SECONDS while other claims wait."""
        return max(MIN_BYTES_PER_RATE_CHECK, self.num_bytes // MAX_RATE_CHECKS)

    def is_too_slow(self, num_received: int, *, is_backlogged: bool = False) -> bool:
        """Whether the client sends its data too slowly while other claims wait. To be called
        every ``seconds_until_check`` or more often, from the grant until all bytes are received.

        The first check begins with the first call after others began to wait: until then a slow
        client delays no other.

        Args:
            num_received: number of bytes received since the claim was made.
            is_backlogged: whether the client has sent more, which the server has not parsed yet.
                Such a client passes the checks before the last. It may still be the one at fault:
                a body of tiny chunks takes thousands of parse turns.
        """
        now, waiting_since = time.monotonic(), self._budget.waiting_since
        last = self._last_check
        if waiting_since is None or last is None or last[0] < waiting_since:
            self._last_check = last = now, num_received
            self._num_checks = 0
        checked_at, num_due = last
        if now - checked_at < RATE_CHECK_SECONDS:
            return False
        num_due += self.min_bytes_per_check
        self._last_check = now, num_due
        self._num_checks += 1
        is_spared = is_backlogged and self._num_checks < MAX_RATE_CHECKS
        return num_received < num_due and not is_spared

    @property
    def seconds_until_check(self) -> float:
        """Seconds until the next call of ``is_too_slow`` is due, after a first one."""
        assert self._last_check is not None
        return self._last_check[0] + RATE_CHECK_SECONDS - time.monotonic()

    def release(self) -> None:
        """Return the bytes to the budget, or stop waiting for them. Idempotent."""
        if not self.is_released:
            self.is_released = True
            self._budget.release(self)


class ByteBudget:
    """Budget of bytes, granted to claims in turns by owner.

    The owner with the fewest granted claims is next, and of its claims the one that arrived first,
    but small claims overtake large ones that arrived shortly before them. The next claim waits
    until its bytes are free, and the others behind it, so that no large claim starves.

    Args:
        num_bytes: maximum number of bytes of all granted claims. A larger claim is granted alone.

    Attributes:
        waiting_since: time at which claims began to wait; None while none waits.
    """

    def __init__(self, num_bytes: int) -> None:
        self.waiting_since: float | None = None
        self._num_bytes = self._num_free_bytes = num_bytes
        self._lines: OwnerLines[ByteClaim] = OwnerLines()

    @property
    def num_waiting(self) -> int:
        """Number of claims that wait."""
        return len(self._lines)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a claim would be granted at once. Any thread may call this."""
        return not self._lines and min(num_bytes, self._num_bytes) <= self._num_free_bytes

    def claim(
        self, num_bytes: int, on_grant: Callable[[], object], owner: str | None = None
    ) -> ByteClaim:
        """Claim bytes. ``on_grant`` is called when they are granted, perhaps before this
        returns."""
        claim = ByteClaim(self, min(num_bytes, self._num_bytes), on_grant, owner)
        now = time.monotonic()
        rank = now + claim.num_bytes / LARGE_CLAIM_DELAY_BYTES_PER_SECOND
        self._lines.push(owner, claim, rank)
        self._grant_next()
        if self._lines and self.waiting_since is None:
            self.waiting_since = now
        return claim

    def release(self, claim: ByteClaim) -> None:
        """Take back the bytes of a claim; see ``ByteClaim.release``."""
        if claim.is_granted:
            self._num_free_bytes += claim.num_bytes
            self._lines.end(claim.owner)
        else:
            self._lines.discard(claim.owner, claim)
        self._grant_next()

    def _grant_next(self) -> None:
        while (claim := self._lines.peek()) is not None and claim.num_bytes <= self._num_free_bytes:
            self._lines.begin(claim.owner, claim)
            self._num_free_bytes -= claim.num_bytes
            claim.is_granted = True
            claim.on_grant()
        if not self._lines:
            self.waiting_since = None
