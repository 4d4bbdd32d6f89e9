"""FramePacer: limits the frames per second that all responses send."""

from __future__ import annotations

SHORTEST, LONGEST = 0.008, 0.1


class FramePacer:
    """Shares a frame rate among the responses in flight, so that frames do not block the loop.

    A pause below 8 ms is not worth a timer; above a tenth of a second, text stutters.

    Args:
        max_rate: frames of text per second, over all responses.
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
        """Seconds between two frames of one response; 0 while there are few responses."""
        pause = self._num_responses * self._seconds_each
        return 0.0 if pause < SHORTEST else min(pause, LONGEST)
