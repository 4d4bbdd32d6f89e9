"""AdmissionPace: number of requests that a step admits while several owners have requests."""

from __future__ import annotations

from asyncllm.core.request import Request

_MIN_ADMISSIONS = 4
"""Number of admissions that any step allows."""

_ADMISSION_SECONDS = 0.0005
"""Time, beside its tokens, that a request's beginning and end take on the engine thread and on the
event loop, which hold the GIL."""

_TOKENS_PER_ADMISSION = 16
"""Number of prompt tokens, computed again for a further output, that count as an admission."""


class AdmissionPace:
    """Bounds a step's admissions, so that they take about as long as the step at most.

    A request of 256 outputs, or of 256 prompts, has as few tokens as one long output, but the time
    of 256 requests. The other owners' requests wait for all admissions of a step.
    """

    def __init__(self) -> None:
        self._decode_seconds = 0.0

    def record_decode_step(self, seconds: float) -> None:
        """Record the time of a step that admitted no request and computed no prompt. A longer time
        counts little by little: the step may have waited for a processor."""
        self._decode_seconds = min(seconds, self._decode_seconds * 1.05 or seconds)

    def max_admissions(self) -> float:
        """Number of admissions of the next step."""
        return max(_MIN_ADMISSIONS, self._decode_seconds / _ADMISSION_SECONDS)

    @staticmethod
    def cost(request: Request, num_tokens: int) -> float:
        """Number of admissions that a request counts as.

        Args:
            num_tokens: number of tokens that its first step computes.
        """
        params = request.sampling
        has_penalties = params.presence_penalty or params.frequency_penalty
        has_penalties = has_penalties or params.repetition_penalty not in (None, 1)
        # These are written to tables, which takes about as long as the rest of a beginning.
        cost = 1 + bool(params.logit_bias or has_penalties)
        if request.first_member is None:
            return cost
        return cost + num_tokens / _TOKENS_PER_ADMISSION
