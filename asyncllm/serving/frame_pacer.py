"""FramePacer: limits the frames per second that all responses send."""

from __future__ import annotations

MIN_PAUSE, MAX_PAUSE = 0.008, 0.1


class FramePacer:
    """Divides a frame rate among the responses in flight, so that frames do not block the loop.

    A pause below MIN_PAUSE is not worth a timer; above MAX_PAUSE, text stutters.

    Args:
        max_rate: frames of text per second, over all responses.
    """

    def __init__(self, max_rate: float) -> None:
        self._seconds_per_frame = 1.0 / max_rate
        self._num_responses = 0

    def begin_response(self) -> None:
        self._num_responses += 1

    def end_response(self) -> None:
        self._num_responses -= 1

    @property
    def pause(self) -> float:
        """Seconds between two frames of one response; 0 while there are few responses."""
        pause = self._num_responses * self._seconds_per_frame
        return 0.0 if pause < MIN_PAUSE else min(pause, MAX_PAUSE)
