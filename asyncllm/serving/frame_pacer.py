"""FramePacer: limits how many frames per second all responses send together."""

from __future__ import annotations

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.008, 0.1
"""Bounds of the pause between two frames: a shorter pause is not worth a timer, and with a longer
one text stutters."""


class FramePacer:
    """Divides a frame rate among the streams of all responses, to bound the event loop's load.

    A response to a list of prompts has a stream for each prompt, and each is sent in frames of its
    own.

    Args:
        max_rate: frames of text per second, over all streams.
    """

    def __init__(self, max_rate: float) -> None:
        self._seconds_per_frame = 1.0 / max_rate
        self._num_streams = 0

    def begin_response(self, num_streams: int = 1) -> None:
        self._num_streams += num_streams

    def end_response(self, num_streams: int = 1) -> None:
        self._num_streams -= num_streams

    @property
    def pause_seconds(self) -> float:
        """Seconds between two frames of one stream; 0 while there are few streams."""
        pause = self._num_streams * self._seconds_per_frame
        return 0.0 if pause < MIN_PAUSE_SECONDS else min(pause, MAX_PAUSE_SECONDS)
