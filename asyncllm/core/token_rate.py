"""TokenRate: how many tokens a second an engine computes in steps with prompts."""

from __future__ import annotations

_HALF_LIFE_SECONDS = 5.0
_MAX_RELATIVE_ERROR = 0.2
"""Maximum relative standard error of the rate; with a larger error the rate counts as unknown."""


class TokenRate:
    """Rate at which an engine computes tokens, in tokens a second.

    A step takes a fixed time besides the time of its tokens. So a line is fitted by least squares
    to step times over token counts, and the rate is the inverse of its slope. A step's weight
    halves for every 5 s of later steps' time. If a step's time does not depend on its tokens, as on
    a memory-bound device, the slope is noise; so the rate is known only if its standard error is
    small.
    """

    def __init__(self) -> None:
        self._count = self._tokens = self._seconds = 0.0
        self._token_squares = self._second_squares = self._products = 0.0

    def add_step(self, num_tokens: int, seconds: float) -> None:
        """Add a finished step to the rate.

        Args:
            num_tokens: number of tokens that the step computed.
            seconds: duration of the step, without the time of earlier steps in flight.
        """
        decay = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        self._count = self._count * decay + 1
        self._tokens = self._tokens * decay + num_tokens
        self._seconds = self._seconds * decay + seconds
        self._token_squares = self._token_squares * decay + num_tokens * num_tokens
        self._second_squares = self._second_squares * decay + seconds * seconds
        self._products = self._products * decay + num_tokens * seconds

    @property
    def tokens_per_second(self) -> float:
        """Rate in tokens a second; 0.0 while it is not known."""
        count = self._count
        # Variances and covariance, times the square of ``count``.
        token_variance = count * self._token_squares - self._tokens * self._tokens
        time_variance = count * self._second_squares - self._seconds * self._seconds
        covariance = count * self._products - self._tokens * self._seconds
        # The sums are rounded, so steps of equal size may have a tiny variance instead of 0.
        if (
            count <= 2.0
            or covariance <= 0.0
            or token_variance <= 1e-6 * self._tokens * self._tokens
        ):
            return 0.0
        residual = token_variance * time_variance - covariance * covariance
        max_residual = _MAX_RELATIVE_ERROR**2 * (count - 2.0) * covariance * covariance
        return token_variance / covariance if residual <= max_residual else 0.0
