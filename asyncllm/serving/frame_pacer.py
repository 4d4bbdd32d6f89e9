"""FramePacer: limits how many frames per second all responses send together."""

from __future__ import annotations

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.008, 0.1
"""Bounds of the pause between two frames: a shorter pause is not worth a timer, and with a longer
one text stutters."""


class FramePacer:
    """Divides a frame rate among the responses in flight, to bound the event loop's load.

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
    def pause_seconds(self) -> float:
        """Seconds between two frames of one response; 0 while there are few responses."""
        pause = self._num_responses * self._seconds_per_frame
        return 0.0 if pause < MIN_PAUSE_SECONDS else min(pause, MAX_PAUSE_SECONDS)
