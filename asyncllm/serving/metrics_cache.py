"""MetricsCache: shares each rendering of the metrics among the clients that wait."""

from __future__ import annotations

import time

import anyio

from asyncllm.metrics import EngineMetrics
from asyncllm.serving.parse_queue import PAUSE_TO_BUSY_RATIO


class MetricsCache:
    """Text of ``/metrics``. All clients that wait get the same rendering.

    Each rendering is followed by a pause of PAUSE_TO_BUSY_RATIO times its duration. So any number
    of scrapes take at most a fifth of the event loop's time.

    Args:
        metrics: metrics of the engine; a rendering takes some milliseconds.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._lock = anyio.Lock()
        self._text = b""
        self._began_at = self._next_at = 0.0

    async def text(self) -> bytes:
        """Metrics in Prometheus' text format, collected after this call began."""
        asked_at = time.monotonic()
        async with self._lock:
            if self._began_at < asked_at:
                if (pause := self._next_at - time.monotonic()) > 0:
                    await anyio.sleep(pause)
                self._began_at = time.monotonic()
                self._text = self._metrics.render()
                ended_at = time.monotonic()
                self._next_at = ended_at + PAUSE_TO_BUSY_RATIO * (ended_at - self._began_at)
            return self._text
