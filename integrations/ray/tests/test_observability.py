"""Metrics by Ray's exporter, traces across the handle, and the autoscaling policy."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
from asyncllm_ray import Client, LoadPolicy
from opentelemetry.sdk.trace import TracerProvider
from ray import serve
from replicas import replica_of, until

from asyncllm import InvalidRequestError


def trace_to_memory(engine: Any) -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from asyncllm.tracing import trace_engine

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace_engine(engine, provider)
    return exporter


def spans_of(_: Any) -> list[tuple[str, int, int]]:
    replica: Any = serve.get_replica_context().servable_object
    spans = replica._prepared.get_finished_spans()
    return [(one.name, one.context.trace_id, one.parent.span_id) for one in spans]


@pytest.mark.slow
async def test_spans_of_replicas_are_children_of_the_callers(deploy: Any) -> None:
    handle = deploy("traced", prepare=trace_to_memory)
    client = Client(handle)
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("caller") as caller:
        stream = client.stream("Mia", max_tokens=3)
    await stream
    found = caller.get_span_context()
    spans = await replica_of(stream).__ray_call__.remote(spans_of)
    assert [one[1:] for one in spans] == [(found.trace_id, found.span_id)]
    client.close()


@pytest.mark.slow
async def test_rays_exporter_has_the_metrics(deploy: Any) -> None:
    handle = deploy("metered")
    client = Client(handle, heartbeat=0.2)
    await client.generate("Mia", max_tokens=7, ignore_eos=True)
    [node] = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    value = re.compile(r'asyncllm_generation_tokens\w*{[^}]*"metered"[^}]*} (\S+)')

    async def is_exported() -> bool:
        stream = client.stream("Mia", max_tokens=480, ignore_eos=True, on_slow="pause")
        async for _ in stream:
            pass
        text = (await httpx.AsyncClient().get(url)).text
        tokens = value.search(text)
        return tokens is not None and float(tokens[1]) >= 7 and "asyncllm_client_requests" in text

    await until(is_exported, 60)
    client.close()


@pytest.mark.parametrize(
    ("tokens", "usage", "expected"),
    [([], [], 1), ([0, 0], [0.1, 0.1], 1), ([900, 300], [0.1, 0.1], 3), ([0], [0.9], 2)],
)
def test_the_policy_counts_the_replicas_that_the_load_needs(
    tokens: list[float], usage: list[float], expected: int
) -> None:
    given = {"queued_tokens": dict(enumerate(tokens)), "kv_cache_usage": dict(enumerate(usage))}
    context = SimpleNamespace(aggregated_metrics=given)
    assert LoadPolicy(queued_tokens=500, kv_cache_usage=0.8)(context) == (expected, {})


def test_a_policy_without_statistics_keeps_one() -> None:
    assert LoadPolicy()(SimpleNamespace(aggregated_metrics=None)) == (1, {})


@pytest.mark.parametrize("name", ["queued_tokens", "kv_cache_usage"])
def test_limits_of_the_policy_are_positive(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        LoadPolicy(**{name: 0})
    assert caught.value.param == name
