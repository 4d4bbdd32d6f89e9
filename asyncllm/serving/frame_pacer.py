"""FramePacer: how often a response may send text, so that frames do not eat up the loop."""

from __future__ import annotations

SHORTEST, LONGEST = 0.008, 0.1


class FramePacer:
    """Shares out a number of frames a second among the responses in flight.

    A pause below 8 ms is not worth its timer, and above a tenth of a second text stutters.

    Args:
        max_rate: frames of text a second, of all responses together.
    """

    def __init__(self, max_rate: float) -> None:
        self._seconds_each = 1.0 / max_rate
        self._num_responses = 0

    def begin(self) -> None:
        self._num_responses += 1

    def end(self) -> None:
        self._num_responses -= 1

    @property
    def pause(self) -> float:
        """Seconds between two frames of one response; 0 while there are few."""
        pause = self._num_responses * self._seconds_each
        return 0.0 if pause < SHORTEST else min(pause, LONGEST)
