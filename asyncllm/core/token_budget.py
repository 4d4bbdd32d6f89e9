"""TokenBudget: maximum number of tokens of a step, lowered after an out-of-memory error."""

from __future__ import annotations

from collections.abc import Iterable

from asyncllm.core.request import Request
from asyncllm.core.scheduled_step import ScheduledStep

_STEPS_TO_RECOVER = 32


class TokenBudget:
    """Token budget of a step. A step that runs out of memory lowers it to half of that step's
    tokens; every 32 successful steps double it, up to ``limit``.

    Args:
        limit: ``max_num_batched_tokens``.

    Attributes:
        tokens: the budget of the next step.
    """

    def __init__(self, limit: int) -> None:
        self.limit = self.tokens = limit
        self._successes_since_change = 0

    def shrink(self, failed_steps: Iterable[ScheduledStep]) -> list[Request]:
        """Lower the budget after ``failed_steps`` ran out of memory, to half of the largest step's
        tokens. If that step had a single token, return its requests, which have to fail."""
        largest = max(failed_steps, key=lambda step: step.batch.num_tokens)
        self._successes_since_change = 0
        if largest.batch.num_tokens == 1:
            return largest.requests
        self.tokens = max(1, largest.batch.num_tokens // 2)
        return []

    def record_success(self) -> None:
        """Count a successful step, and raise the budget after enough successes."""
        if self.tokens < self.limit:
            self._successes_since_change += 1
            if self._successes_since_change >= _STEPS_TO_RECOVER:
                self._successes_since_change = 0
                self.tokens = min(2 * self.tokens, self.limit)
