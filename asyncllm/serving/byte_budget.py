"""ByteBudget: bounds the bytes that many connections hold in memory together."""

from __future__ import annotations

from collections.abc import Callable


class ByteClaim:
    """A connection's part of a ByteBudget, made by ``ByteBudget.claim``.

    Attributes:
        size: number of bytes.
        granted: whether the bytes may be held; until then the claim waits.
    """

    __slots__ = ("_budget", "_on_grant", "granted", "size")

    def __init__(self, budget: ByteBudget, size: int, on_grant: Callable[[], object]) -> None:
        self._budget = budget
        self._on_grant = on_grant
        self.size = size
        self.granted = False

    def grant(self) -> None:
        self.granted = True
        self._on_grant()

    def release(self) -> None:
        """Return the bytes, or stop waiting for them. Idempotent."""
        self._budget.release(self)


class ByteBudget:
    """Budget of bytes. Claims are granted in order of arrival, so that no claim starves.

    Args:
        num_bytes: maximum number of bytes of all granted claims. A larger claim is granted alone.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._num_free = num_bytes
        self._claims: dict[ByteClaim, None] = {}

    def claim(self, size: int, on_grant: Callable[[], object]) -> ByteClaim:
        """Claim bytes; ``on_grant`` is called once they may be held, perhaps at once."""
        claim = ByteClaim(self, min(size, self._num_bytes), on_grant)
        self._claims[claim] = None
        self._grant_next()
        return claim

    def release(self, claim: ByteClaim) -> None:
        if claim in self._claims:
            del self._claims[claim]
            if claim.granted:
                self._num_free += claim.size
            self._grant_next()

    def _grant_next(self) -> None:
        waiting = (claim for claim in list(self._claims) if not claim.granted)
        for claim in waiting:
            if claim.size > self._num_free:
                return
            self._num_free -= claim.size
            claim.grant()
