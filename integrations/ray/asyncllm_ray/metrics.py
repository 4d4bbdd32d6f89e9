"""Metrics of replicas and clients, through Ray's exporter."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ray.serve import metrics as replica_metrics
from ray.util import metrics

from asyncllm.core.request import Request
from asyncllm.observer import RequestInfo
from asyncllm.outputs import EngineStats, Usage
from asyncllm_ray.counters import Counters

_TIMES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
_GAUGES = (
    "num_running",
    "num_waiting",
    "num_paused",
    "num_queued_tokens",
    "kv_cache_usage",
    "num_free_blocks",
)
_COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "num_requests",
    "num_rejected",
    "num_finished",
    "num_aborted",
    "num_failed",
)


class ReplicaMetrics:
    """Observer that records an engine's metrics, tagged with replica and deployment.

    Gauges and counters are named after fields of ``EngineStats``, with the prefix ``asyncllm_``.
    """

    def __init__(self) -> None:
        self._gauges = {name: _make(replica_metrics.Gauge, name) for name in _GAUGES}
        self._counters = {name: _make(replica_metrics.Counter, name) for name in _COUNTERS}
        self._first = _make(replica_metrics.Histogram, "time_to_first_token_seconds", _TIMES)
        self._whole = _make(replica_metrics.Histogram, "e2e_request_latency_seconds", _TIMES)
        self._expired = _make(replica_metrics.Counter, "lost_clients")
        self._last = EngineStats()
        self._num_expired = 0

    def on_submit(self, request: Request, submission: RequestInfo) -> None:
        """Do nothing: requests are counted by the engine."""

    def on_finish(self, request: Request, usage: Usage, error: BaseException | None) -> None:
        if usage.ttft is not None:
            self._first.observe(usage.ttft)
        self._whole.observe(usage.total_time)

    def update(self, stats: EngineStats, num_expired: int) -> None:
        """Record the engine's statistics as they are now.

        Args:
            num_expired: streams that ended because their client was lost.
        """
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, counter in self._counters.items():
            _add(counter, getattr(stats, name) - getattr(self._last, name))
        _add(self._expired, num_expired - self._num_expired)
        self._last, self._num_expired = stats, num_expired


class ClientMetrics:
    """Metrics of a client: its counters, with the prefix ``asyncllm_client_``."""

    def __init__(self) -> None:
        names = [one.name for one in fields(Counters)]
        self._counters = {name: _make(metrics.Counter, f"client_{name}") for name in names}
        self._last = Counters()

    def update(self, counters: Counters) -> None:
        """Record a copy of the client's counters."""
        for name, counter in self._counters.items():
            _add(counter, getattr(counters, name) - getattr(self._last, name))
        self._last = counters


def _make(kind: Any, name: str, *options: Any) -> Any:
    return kind(f"asyncllm_{name}", f"See EngineStats and Counters: {name}.", *options)


def _add(counter: Any, count: float) -> None:
    # Ray refuses to add 0.
    if count > 0:
        counter.inc(count)
