"""TokenRate: how many tokens a second an engine computes in steps with prompts."""

from __future__ import annotations

_HALF_LIFE = 5.0


class TokenRate:
    """Rate at which tokens are added to steps, in tokens a second.

    A step takes a time of its own besides that of its tokens. So the rate is the slope of a
    least-squares fit of the steps' tokens by their times, in which the weight of a step halves with
    every 5 s that later steps have taken.
    """

    def __init__(self) -> None:
        self._count = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add a step.

        Args:
            num_tokens: tokens that it computed.
            seconds: time that it took; without that of earlier steps in flight.
        """
        kept = 0.5 ** (seconds / _HALF_LIFE)
        self._count = self._count * kept + 1
        self._tokens = self._tokens * kept + num_tokens
        self._seconds = self._seconds * kept + seconds
        self._squares = self._squares * kept + num_tokens * num_tokens
        self._products = self._products * kept + num_tokens * seconds

    @property
    def tokens_per_second(self) -> float:
        """The rate; 0.0 before the first step. If all steps have the same number of tokens, or
        larger ones take no longer, all tokens by the time of all steps."""
        squares = self._count * self._squares - self._tokens * self._tokens
        products = self._count * self._products - self._tokens * self._seconds
        # The sums are rounded, so equal steps may differ in the last digits.
        if squares > 1e-6 * self._tokens * self._tokens and products > 0.0:
            return squares / products
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0
