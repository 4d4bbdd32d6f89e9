"""AdmissionPace: number of an owner's requests that a step admits beside other owners."""

from __future__ import annotations

from asyncllm.core.request import Request

_MIN_ADMISSIONS = 2
"""Minimum number of admissions of each owner that every step allows."""

_ADMISSION_SECONDS = 0.0005
"""Time to admit and finish a request, without its tokens, on the engine thread and the event loop,
which both hold the GIL."""

_ADMISSION_SHARE = 0.5
"""Maximum time of one owner's admissions in a step, as a fraction of the time of a decode step."""

_TOKENS_PER_ADMISSION = 16
"""Number of prompt tokens, computed again for a further output, that count as an admission."""


class AdmissionPace:
    """Bounds a step's admissions of each owner, so that they take at most about half its time.

    A request of 256 outputs, or of 256 prompts, has as few tokens as one long output, but the time
    of 256 requests. The other owners' requests wait for all admissions of a step. The bound is for
    each owner: one for all together would leave the last turn to owners with running requests.
    """

    def __init__(self) -> None:
        self._decode_seconds = 0.0
        self._num_admissions: dict[str | None, float] = {}

    def record_decode_step(self, seconds: float) -> None:
        """Record the time of a step that admitted no request and computed no prompt. A longer time
        than before raises the estimate slowly: the step may have waited for a processor."""
        self._decode_seconds = min(seconds, self._decode_seconds * 1.05 or seconds)

    def begin_step(self) -> None:
        self._num_admissions.clear()

    @property
    def max_admissions(self) -> float:
        """Maximum number of admissions of each owner in a step."""
        return max(_MIN_ADMISSIONS, self._decode_seconds * _ADMISSION_SHARE / _ADMISSION_SECONDS)

    def count(self, request: Request, num_tokens: int) -> bool:
        """Count an admission; returns whether the step may admit more of the request's owner.

        Args:
            num_tokens: number of tokens that the request's first step computes.
        """
        params = request.sampling
        has_penalties = params.presence_penalty or params.frequency_penalty
        has_penalties = has_penalties or params.repetition_penalty not in (None, 1)
        # Writing penalties and biases to LogitsTables takes about as long as the rest of an
        # admission.
        cost = 1 + bool(params.logit_bias or has_penalties)
        if request.first_member is not None:
            cost += num_tokens / _TOKENS_PER_ADMISSION
        total = self._num_admissions.get(request.owner, 0.0) + cost
        self._num_admissions[request.owner] = total
        return total < self.max_admissions
