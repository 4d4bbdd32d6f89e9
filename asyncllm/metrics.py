"""Prometheus metrics of engines; needs the extra ``asyncllm[metrics]``."""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from asyncllm.core.request import Request
from asyncllm.errors import EngineClosedError, InvalidRequestError
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
        "asyncllm.metrics needs prometheus-client: pip install 'asyncllm[metrics]'",
        name=error.name,
    ) from error


def _one_two_five(highest: float) -> Iterator[float]:
    """1, 2, 5, 10, 20, 50 … up to ``highest``."""
    for exponent in itertools.count():
        for digit in (1, 2, 5):
            value = float(digit * 10**exponent)
            if value > highest:
                return
            yield value


FINE = tuple(value / 1000 for value in _one_two_five(1_000_000))
"""1 ms to 1000 s: for small models as well as for long queues."""
TOKENS = tuple(_one_two_five(1_000_000))
# vLLM's own, by which its dashboards and alerts are written.
_VLLM_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_VLLM_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_VLLM_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class _HistogramSpec(NamedTuple):
    """``observe`` yields a value and how often it counts, or None for nothing. Without it, the
    value is known before the request ends."""

    name: str
    documentation: str
    vllm_buckets: tuple[float, ...]
    observe: Callable[[Request, Usage], tuple[float, int] | None] | None


def _per_token(_: Request, usage: Usage) -> tuple[float, int] | None:
    mean = usage.inter_token_time
    return None if mean is None else (mean, 1)


def _between_tokens(_: Request, usage: Usage) -> tuple[float, int] | None:
    mean = usage.inter_token_time
    return None if mean is None else (mean, usage.completion_tokens - 1)


def _prefill(_: Request, usage: Usage) -> tuple[float, int] | None:
    return None if usage.ttft is None else (usage.ttft - usage.queue_time, 1)


def _decode(_: Request, usage: Usage) -> tuple[float, int] | None:
    return None if usage.ttft is None else (usage.total_time - usage.ttft, 1)


def _max_tokens(request: Request, _: Usage) -> tuple[float, int] | None:
    limit = request.sampling.max_tokens
    return None if limit is None else (limit, 1)


_HISTOGRAMS = (
    _HistogramSpec(
        "time_to_first_token_seconds",
        "From submission to the first token.",
        _VLLM_FIRST_TOKEN,
        None,
    ),
    _HistogramSpec(
        "inter_token_latency_seconds",
        "Time between two tokens: a request's mean, counted once for each of its intervals.",
        _VLLM_PER_TOKEN,
        _between_tokens,
    ),
    _HistogramSpec(
        "request_time_per_output_token_seconds",
        "Mean time between two tokens of a request.",
        _VLLM_PER_TOKEN,
        _per_token,
    ),
    _HistogramSpec(
        "e2e_request_latency_seconds",
        "From submission to the end of the request.",
        _VLLM_LATENCY,
        lambda _, usage: (usage.total_time, 1),
    ),
    _HistogramSpec(
        "request_queue_time_seconds",
        "From submission to the first step.",
        _VLLM_LATENCY,
        lambda _, usage: (usage.queue_time, 1),
    ),
    _HistogramSpec(
        "request_prefill_time_seconds",
        "From the first step to the first token.",
        _VLLM_LATENCY,
        _prefill,
    ),
    _HistogramSpec(
        "request_decode_time_seconds",
        "From the first token to the end.",
        _VLLM_LATENCY,
        _decode,
    ),
    _HistogramSpec(
        "request_inference_time_seconds",
        "From the first step to the end.",
        _VLLM_LATENCY,
        lambda _, usage: (usage.total_time - usage.queue_time, 1),
    ),
    _HistogramSpec(
        "request_prompt_tokens",
        "Prompt tokens of a request.",
        TOKENS,
        lambda _, usage: (usage.prompt_tokens, 1),
    ),
    _HistogramSpec(
        "request_generation_tokens",
        "Output tokens of a request.",
        TOKENS,
        lambda _, usage: (usage.completion_tokens, 1),
    ),
    _HistogramSpec(
        "request_max_num_generation_tokens",
        "Tokens of a request's longest output.",
        TOKENS,
        lambda _, usage: (usage.completion_tokens, 1),
    ),
    _HistogramSpec(
        "request_params_max_tokens",
        "The max_tokens of requests that set it.",
        TOKENS,
        _max_tokens,
    ),
)


class _StatSpec(NamedTuple):
    """A number that is read from ``engine.stats()`` at scrape time. ``own`` is one that vLLM
    does not have; its name begins with "asyncllm:" in every case."""

    name: str
    documentation: str
    field: str
    counter: bool
    own: bool = False


_STATS = (
    _StatSpec("num_requests_running", "Requests in the batch.", "num_running", False),
    _StatSpec("num_requests_waiting", "Requests waiting for a place.", "num_waiting", False),
    _StatSpec(
        "num_requests_paused", "Requests held back: nobody reads.", "num_paused", False, True
    ),
    _StatSpec("kv_cache_usage_perc", "KV blocks in use; 1 is all.", "kv_cache_usage", False),
    _StatSpec("prompt_tokens", "Prompt tokens scheduled.", "prompt_tokens", True),
    _StatSpec("generation_tokens", "Tokens generated.", "generation_tokens", True),
    _StatSpec("num_preemptions", "Requests that lost their blocks.", "num_preemptions", True),
    _StatSpec(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        "prefix_cache_queries",
        True,
    ),
    _StatSpec("prefix_cache_hits", "Of these, tokens found.", "prefix_cache_hits", True),
    _StatSpec(
        "requests_rejected", "Requests refused: the queue was full.", "num_rejected", True, True
    ),
)

_REASONS = ("stop", "length", "tool_calls", "abort", "error")


class _Histogram:
    """Counts per bucket, and a sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """As the exposition wants them: upper bound and how many are at most that."""
        names = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self.counts), strict=True))


class _EngineRecord:
    """What was observed of one engine. The step loop writes, a scrape reads."""

    def __init__(self, engine: AsyncLLMEngine, labels: tuple[str, ...], vllm_buckets: bool) -> None:
        # Weak: the engine thread knows its requests, and a request its observers.
        self.engine = weakref.ref(engine)
        self.labels = labels
        self.lock = threading.Lock()
        self.histograms = [
            _Histogram(spec.vllm_buckets if vllm_buckets or spec.vllm_buckets is TOKENS else FINE)
            for spec in _HISTOGRAMS
        ]
        (self._first_token,) = (
            histogram
            for spec, histogram in zip(_HISTOGRAMS, self.histograms, strict=True)
            if spec.observe is None
        )
        self.finished = dict.fromkeys(_REASONS, 0)
        self.errors: dict[str, int] = {}
        self._stats = EngineStats()

    def on_submit(self, request: Request, submission: RequestInfo) -> None:
        """Nothing to count yet."""

    def on_first_token(self, request: Request) -> None:
        """At once: of the requests that are slow to end, the end would tell too late."""
        assert request.first_token_at is not None
        with self.lock:
            self._first_token.observe(request.first_token_at - request.arrived_at, 1)

    def on_finish(self, request: Request, usage: Usage, error: BaseException | None) -> None:
        reason = "error" if error is not None else request.finish_reason or "abort"
        with self.lock:
            self.finished[reason] += 1
            if error is not None:
                name = type(error).__name__
                self.errors[name] = self.errors.get(name, 0) + 1
            for spec, histogram in zip(_HISTOGRAMS, self.histograms, strict=True):
                observed = spec.observe(request, usage) if spec.observe is not None else None
                if observed is not None:
                    histogram.observe(*observed)

    def stats(self) -> EngineStats:
        """The engine's numbers; once it is closed, the last ones seen, with nothing live."""
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


class EngineMetrics(Collector):
    """Metrics of one engine or of several, for Prometheus.

        metrics = EngineMetrics(engine)
        body = metrics.render()

    Histograms are filled as requests end, that of the time to the first token when it comes;
    gauges and counters are read from the engine when
    somebody scrapes, so that an idle engine costs nothing.

    Args:
        engine: an engine in any state, or several; the label ``engine`` counts them from 0.
        registry: where to register; None makes a private one. prometheus_client's global
            registry is used only if it is given.
        compat: "vllm" gives the metrics vLLM's names and buckets, so that dashboards made
            for vLLM work; None names them "asyncllm:…".
        labels: further labels of every metric. ``model_name`` replaces the model as it was
            asked for.

    Raises:
        InvalidRequestError: for another ``compat``, or labels that are no labels.
        ValueError: if the registry has these metrics already. Engines that share a registry
            share one EngineMetrics.
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
            raise InvalidRequestError(f'compat={compat!r}: expected "vllm" or None', param="compat")
        engines = list(engine) if isinstance(engine, Sequence) else [engine]
        if not engines:
            raise InvalidRequestError("engine=[]: expected at least one engine", param="engine")
        extra = _checked(labels)
        model_name = extra.pop("model_name", None)
        self._prefix = "asyncllm:" if compat is None else "vllm:"
        self._label_names = ("model_name", "engine", *extra)
        self._records = [
            _EngineRecord(
                one,
                (model_name or one.config.model_name, str(index), *extra.values()),
                compat is not None,
            )
            for index, one in enumerate(engines)
        ]
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)
        self._closed = False
        for one, record in zip(engines, self._records, strict=True):
            one.add_observer(record)

    def render(self) -> bytes:
        """The registry in Prometheus' text format, whose content type is
        ``prometheus_client.CONTENT_TYPE_LATEST``."""
        return generate_latest(self.registry)

    def close(self) -> None:
        """Leaves the engines and the registry alone from now on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for record in self._records:
            engine = record.engine()
            if engine is not None:
                engine.remove_observer(record)
        self.registry.unregister(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- what the registry asks --------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        """The names, so that a registry refuses them a second time."""
        return self._families()

    def collect(self) -> Iterable[Metric]:
        stats = [(record, record.stats()) for record in self._records]
        families = self._families()
        for spec, family in zip(_STATS, families, strict=False):
            assert isinstance(family, (CounterMetricFamily, GaugeMetricFamily))
            for record, snapshot in stats:
                family.add_metric(record.labels, getattr(snapshot, spec.field))
        success, errors, *histograms = families[len(_STATS) :]
        assert isinstance(success, CounterMetricFamily)
        assert isinstance(errors, CounterMetricFamily)
        for record in self._records:
            with record.lock:
                for reason, count in record.finished.items():
                    success.add_metric((*record.labels, reason), count)
                for name, count in record.errors.items():
                    errors.add_metric((*record.labels, name), count)
                for family, histogram in zip(histograms, record.histograms, strict=True):
                    assert isinstance(family, HistogramMetricFamily)
                    family.add_metric(record.labels, histogram.buckets(), histogram.total)
        return families

    def _families(self) -> list[Metric]:
        """Every family, without samples: those of ``_STATS``, the requests by reason, the
        errors by type, those of ``_HISTOGRAMS``."""
        families: list[Metric] = []
        for stat in _STATS:
            kind = CounterMetricFamily if stat.counter else GaugeMetricFamily
            prefix = "asyncllm:" if stat.own else self._prefix
            families.append(kind(prefix + stat.name, stat.documentation, labels=self._label_names))
        families.append(
            CounterMetricFamily(
                self._prefix + "request_success",
                "Requests that ended, by finish reason; error is an exception.",
                labels=(*self._label_names, "finished_reason"),
            )
        )
        families.append(
            CounterMetricFamily(
                "asyncllm:request_errors",
                "Requests that ended with an exception, by its type.",
                labels=(*self._label_names, "error_type"),
            )
        )
        for spec in _HISTOGRAMS:
            families.append(
                HistogramMetricFamily(
                    self._prefix + spec.name, spec.documentation, labels=self._label_names
                )
            )
        return families


def _checked(labels: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of the labels."""
    checked = dict(labels or {})
    for name, value in checked.items():
        usable = isinstance(name, str) and name.isidentifier() and name.isascii()
        if not usable or not isinstance(value, str) or name.startswith("__"):
            raise InvalidRequestError(
                f"labels: {name!r}={value!r}; expected names like identifiers and text values",
                param="labels",
            )
        if name in ("engine", "le", "finished_reason", "error_type"):
            raise InvalidRequestError(
                f"labels: {name!r} is one of the metrics' own labels", param="labels"
            )
    return checked
