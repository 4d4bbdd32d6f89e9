"""TokenRate: how many tokens a second an engine computes in steps with prompts."""

from __future__ import annotations

_HALF_LIFE = 5.0


class TokenRate:
    """Rate of the latest steps with prompts, in tokens a second.

    A step takes a time of its own besides that of its tokens, so small steps have a low rate. The
    rate is the least-squares fit of the steps' times by their tokens, in which large steps count
    most. The weight of a step halves with every 5 s that later steps have taken.
    """

    def __init__(self) -> None:
        self._squares = self._products = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add a step.

        Args:
            num_tokens: tokens that it computed.
            seconds: time that it took; without that of earlier steps in flight.
        """
        kept = 0.5 ** (seconds / _HALF_LIFE)
        self._squares = self._squares * kept + num_tokens * num_tokens
        self._products = self._products * kept + num_tokens * seconds

    @property
    def tokens_per_second(self) -> float:
        """The rate; 0.0 before the first step."""
        return self._squares / self._products if self._products > 0.0 else 0.0
