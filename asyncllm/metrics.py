"""Prometheus metrics of engines; needs the extra ``asyncllm[metrics]``."""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from asyncllm import validation as check
from asyncllm.core.request import Request
from asyncllm.errors import EngineClosedError
from asyncllm.group import EngineGroup
from asyncllm.observer import RequestInfo
from asyncllm.outputs import EngineStats, Usage

if TYPE_CHECKING:
    from asyncllm.engine import AsyncLLMEngine

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "asyncllm.metrics needs prometheus-client: pip install 'asyncllm[metrics]'", name=error.name
    ) from error


FamilyT = TypeVar("FamilyT", bound=Metric)


TOKEN_BUCKETS = (*(digit * 10.0**power for power in range(6) for digit in (1, 2, 5)), 1e6)
"""Bucket bounds of token counts: 1, 2, 5, 10, 20, 50 … up to a million."""
LATENCY_BUCKETS_SECONDS = tuple(value / 1000 for value in TOKEN_BUCKETS)
"""Bucket bounds of times: 1 ms to 1000 s, for small models as well as long queues."""
OUTPUTS_PER_REQUEST_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
# vLLM's buckets, which its dashboards and alerts expect.
_VLLM_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_VLLM_TIME_PER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_VLLM_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From submission to the first token.", _VLLM_TTFT_BUCKETS),
    (
        "inter_token_latency_seconds",
        "Time between two tokens: a request's mean, counted once for each of its intervals.",
        _VLLM_TIME_PER_TOKEN_BUCKETS,
    ),
    (
        "request_time_per_output_token_seconds",
        "Mean time between two tokens of a request.",
        _VLLM_TIME_PER_TOKEN_BUCKETS,
    ),
    (
        "e2e_request_latency_seconds",
        "From submission to the end of the request.",
        _VLLM_LATENCY_BUCKETS,
    ),
    ("request_queue_time_seconds", "From submission to the first step.", _VLLM_LATENCY_BUCKETS),
    (
        "request_prefill_time_seconds",
        "From the first step to the first token.",
        _VLLM_LATENCY_BUCKETS,
    ),
    ("request_decode_time_seconds", "From the first token to the end.", _VLLM_LATENCY_BUCKETS),
    ("request_inference_time_seconds", "From the first step to the end.", _VLLM_LATENCY_BUCKETS),
    ("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS),
    ("request_generation_tokens", "Output tokens of a request.", TOKEN_BUCKETS),
    ("request_max_num_generation_tokens", "Tokens of a request's longest output.", TOKEN_BUCKETS),
    ("request_params_max_tokens", "The max_tokens of requests that set it.", TOKEN_BUCKETS),
    ("request_params_n", "The n of requests: outputs asked for.", OUTPUTS_PER_REQUEST_BUCKETS),
)
"""Name, documentation and vLLM's bucket bounds of each histogram."""

# Name, field of EngineStats, documentation. vLLM has no counterpart of ``asyncllm:…`` names.
_GAUGES = (
    ("num_requests_running", "num_running", "Requests in the batch."),
    ("num_requests_waiting", "num_waiting", "Requests waiting for a place."),
    (
        "asyncllm:num_requests_paused",
        "num_paused",
        "Requests held back: their readers are late, or grammars take much memory.",
    ),
    ("kv_cache_usage_perc", "kv_cache_usage", "KV blocks in use; 1 is all."),
    (
        "asyncllm:cached_states",
        "num_cached_states",
        "Recurrent states of prefixes that requests can go on from.",
    ),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens scheduled."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("num_preemptions", "num_preemptions", "Requests that lost their blocks."),
    (
        "prefix_cache_queries",
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
    ),
    ("prefix_cache_hits", "prefix_cache_hits", "Of these, tokens found."),
    ("asyncllm:requests_rejected", "num_rejected", "Requests refused: the queue was full."),
)

_FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")


class _Histogram:
    """Histogram: counts per bucket, and a sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, num_times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += num_times
        self.total += value * num_times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative buckets for the exposition: upper bound, and count up to it."""
        names = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self.counts), strict=True))


class _EngineRecord:
    """Observations of one engine, written by the step loop and read by a scrape."""

    def __init__(self, engine: AsyncLLMEngine, labels: tuple[str, ...], vllm_buckets: bool) -> None:
        # A strong reference would keep the engine alive: the engine thread refers to its requests,
        # and requests refer to this observer.
        self.engine = weakref.ref(engine)
        self.labels = labels
        self.lock = threading.Lock()
        self.histograms = {
            name: _Histogram(
                buckets
                if vllm_buckets or buckets in (TOKEN_BUCKETS, OUTPUTS_PER_REQUEST_BUCKETS)
                else LATENCY_BUCKETS_SECONDS
            )
            for name, _, buckets in _HISTOGRAMS
        }
        self.num_finished = dict.fromkeys(_FINISH_REASONS, 0)
        self.errors: dict[str, int] = {}
        self._stats = EngineStats()

    def engine_records(self) -> list[_EngineRecord]:
        return [self]

    def on_submit(self, request: Request, submission: RequestInfo) -> None:
        """Do nothing: requests are counted when they end."""

    def on_first_token(self, request: Request) -> None:
        """Record the time to first token now: a slow request ends long after its first token."""
        assert request.first_token_at is not None
        waited = request.first_token_at - request.arrived_at
        with self.lock:
            self.histograms["time_to_first_token_seconds"].observe(waited)

    def on_finish(self, request: Request, usage: Usage, error: BaseException | None) -> None:
        reason = "error" if error is not None else request.finish_reason or "abort"
        with self.lock:
            self.num_finished[reason] += 1
            if error is not None:
                name = type(error).__name__
                self.errors[name] = self.errors.get(name, 0) + 1
            for name, value in _observed_values(request, usage):
                self.histograms[name].observe(value)
            if usage.inter_token_time is not None:
                intervals = self.histograms["inter_token_latency_seconds"]
                intervals.observe(usage.inter_token_time, usage.longest_output - 1)

    def stats(self) -> EngineStats:
        """Statistics of the engine; once it has closed, the last ones, without live requests."""
        engine = self.engine()
        try:
            if engine is None:
                raise EngineClosedError
            self._stats = engine.stats()
        except EngineClosedError:
            self._stats = replace(
                self._stats, num_running=0, num_waiting=0, num_paused=0, kv_cache_usage=0.0
            )
        return self._stats


class _GroupObserver:
    """Observer of an EngineGroup; keeps an ``_EngineRecord`` for each engine of the group."""

    def __init__(
        self, group: EngineGroup, make_engine_record: Callable[[AsyncLLMEngine, int], _EngineRecord]
    ) -> None:
        self.engine = weakref.ref(group)
        self._make_record = make_engine_record
        self._records: dict[int | None, _EngineRecord] = {}

    def on_submit(self, request: Request, submission: RequestInfo) -> None:
        """Make the engines' records now: an engine may be removed before its requests end."""
        self.engine_records()

    def on_first_token(self, request: Request) -> None:
        self._records[request.group.engine].on_first_token(request)

    def on_finish(self, request: Request, usage: Usage, error: BaseException | None) -> None:
        self._records[request.group.engine].on_finish(request, usage, error)

    def engine_records(self) -> list[_EngineRecord]:
        """Records of all current and former engines of the group."""
        group = self.engine()
        for number, engine in ({} if group is None else group.engines).items():
            if number not in self._records:
                self._records.setdefault(number, self._make_record(engine, number))
        return list(self._records.values())


def _observed_values(request: Request, usage: Usage) -> Iterator[tuple[str, float]]:
    """Observed values of a finished request, by histogram."""
    yield "e2e_request_latency_seconds", usage.total_time
    yield "request_queue_time_seconds", usage.queue_time
    yield "request_inference_time_seconds", usage.total_time - usage.queue_time
    yield "request_prompt_tokens", usage.prompt_tokens
    yield "request_generation_tokens", usage.completion_tokens
    yield "request_max_num_generation_tokens", usage.longest_output
    yield "request_params_n", request.sampling.n
    if request.sampling.max_tokens is not None:
        yield "request_params_max_tokens", request.sampling.max_tokens
    if usage.ttft is not None:
        yield "request_prefill_time_seconds", usage.ttft - usage.queue_time
        yield "request_decode_time_seconds", usage.total_time - usage.ttft
    if usage.inter_token_time is not None:
        yield "request_time_per_output_token_seconds", usage.inter_token_time


class EngineMetrics(Collector):
    """Prometheus metrics of one or several engines.

        metrics = EngineMetrics(engine)
        body = metrics.render()

    Histograms are updated when requests end; the time to first token is recorded when that token
    arrives. Gauges and counters are read from the engine at each scrape, so an idle engine costs
    nothing.

    Args:
        engine: an engine in any state, or several; the label ``engine`` counts them from 0. For an
            EngineGroup, the label is each engine's number in the group.
        registry: registry to use; None makes a private one. prometheus_client's global registry is
            used only if it is passed.
        compat: "vllm" gives the metrics vLLM's names and buckets, so that dashboards made
            for vLLM work; None names them "asyncllm:…".
        labels: further labels of every metric. ``model_name`` overrides
            ``EngineConfig.model_name``.

    Raises:
        InvalidRequestError: for an unknown ``compat``, or invalid labels.
        ValueError: if the registry has these metrics already. Engines that share a registry
            need one EngineMetrics for all.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine | Sequence[AsyncLLMEngine],
        *,
        registry: CollectorRegistry | None = None,
        compat: Literal["vllm"] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if compat not in (None, "vllm"):
            raise check.value_error("compat", compat, '"vllm" or None')
        engines = list(engine) if isinstance(engine, Sequence) else [engine]
        if not engines:
            raise check.value_error("engine", engines, "at least one engine")
        if len(engines) > 1 and any(isinstance(engine, EngineGroup) for engine in engines):
            problem = "expected an EngineGroup alone, not beside other engines"
            raise check.argument_error("engine", problem)
        extra = _check_labels(labels)
        model_name = extra.pop("model_name", None)
        self._prefix = "asyncllm:" if compat is None else "vllm:"
        self._label_names = ("model_name", "engine", *extra)

        def make_engine_record(engine: AsyncLLMEngine, engine_index: int) -> _EngineRecord:
            labels = (model_name or engine.config.model_name, str(engine_index), *extra.values())
            return _EngineRecord(engine, labels, compat is not None)

        self._observers = [
            _GroupObserver(engine_or_group, make_engine_record)
            if isinstance(engine_or_group, EngineGroup)
            else make_engine_record(engine_or_group, index)
            for index, engine_or_group in enumerate(engines)
        ]
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)
        self._is_closed = False
        for engine_or_group, observer in zip(engines, self._observers, strict=True):
            engine_or_group.add_observer(observer)

    def render(self) -> bytes:
        """Render the registry in Prometheus' text format; the content type is
        ``prometheus_client.CONTENT_TYPE_LATEST``."""
        return generate_latest(self.registry)

    def close(self) -> None:
        """Unregister the collector, and stop observing the engines. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for observer in self._observers:
            if (engine := observer.engine()) is not None:
                engine.remove_observer(observer)
        self.registry.unregister(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- methods that the registry calls -----------------------------------------------

    def describe(self) -> Iterable[Metric]:
        """Make all metric families without samples. A registry finds duplicate names by them."""
        return self._make_families(())

    def collect(self) -> Iterable[Metric]:
        return self._make_families(
            [record for observer in self._observers for record in observer.engine_records()]
        )

    def _make_families(self, records: Sequence[_EngineRecord]) -> list[Metric]:
        """Make all metric families, with samples from ``records``."""
        stats = [(record.labels, record.stats()) for record in records]
        families: list[Metric] = []
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, field, documentation in table:
                family = self._make_family(kind, name, documentation)
                for labels, snapshot in stats:
                    family.add_metric(labels, getattr(snapshot, field))
                families.append(family)
        success = self._make_family(
            CounterMetricFamily,
            "request_success",
            "Requests that ended, by finish reason; error is an exception.",
            "finished_reason",
        )
        errors = self._make_family(
            CounterMetricFamily,
            "asyncllm:request_errors",
            "Requests that ended with an exception, by its type.",
            "error_type",
        )
        histograms = {
            name: self._make_family(HistogramMetricFamily, name, documentation)
            for name, documentation, _ in _HISTOGRAMS
        }
        for record in records:
            with record.lock:
                for reason, count in record.num_finished.items():
                    success.add_metric((*record.labels, reason), count)
                for error, count in record.errors.items():
                    errors.add_metric((*record.labels, error), count)
                for name, histogram in record.histograms.items():
                    histograms[name].add_metric(record.labels, histogram.buckets(), histogram.total)
        return [*families, success, errors, *histograms.values()]

    def _make_family(
        self, kind: Callable[..., FamilyT], name: str, documentation: str, *labels: str
    ) -> FamilyT:
        name = name if ":" in name else self._prefix + name
        return kind(name, documentation, labels=(*self._label_names, *labels))


def _check_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """Check the labels; returns a copy of them."""
    checked = dict(labels or {})
    for name, value in checked.items():
        usable = isinstance(name, str) and name.isidentifier() and name.isascii()
        if not usable or not isinstance(value, str) or name.startswith("__"):
            problem = f"{name!r}={value!r}; expected names like identifiers and text values"
            raise check.argument_error("labels", problem)
        if name in ("engine", "le", "finished_reason", "error_type"):
            raise check.argument_error("labels", f"{name!r} is one of the metrics' own labels")
    return checked
