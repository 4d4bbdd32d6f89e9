"""Traces: one span for each request."""

from __future__ import annotations

import json
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from asyncllm import EngineDeadError, RequestError
from asyncllm.tracing import EngineTracing, trace_engine
from tests.fakes import fake
from tests.missing_package import import_error


class Trace:
    def __init__(self, **options):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    def spans(self):
        return [s for s in self.exporter.get_finished_spans() if s.name.count(" ")]

    def span(self):
        (span,) = self.spans()
        return span


@pytest.fixture
def trace():
    return Trace()


async def test_a_completion_is_one_span_by_the_conventions(trace):
    async with fake(block_size=4).engine(model="some/model") as engine:
        await engine.generate(list(range(9)), max_tokens=1)
        trace_engine(engine, trace.provider)
        stream = engine.stream(
            list(range(9)),
            max_tokens=5,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            presence_penalty=0.5,
            seed=11,
            stop=["never"],
            request_id="mine",
        )
        await stream.result()
    span = trace.span()
    assert span.name == "text_completion some/model"
    assert span.kind is SpanKind.INTERNAL
    assert span.instrumentation_scope.name == "asyncllm"
    attributes = dict(span.attributes)
    assert attributes.pop("asyncllm.queue_time") == stream.usage.queue_time
    assert attributes.pop("gen_ai.response.time_to_first_chunk") == stream.usage.ttft
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "asyncllm",
        "gen_ai.request.model": "some/model",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.presence_penalty": 0.5,
        "gen_ai.request.seed": 11,
        "gen_ai.request.stop_sequences": ("never",),
        "gen_ai.output.type": "text",
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "asyncllm.num_preemptions": 0,
    }
    assert span.status.status_code is StatusCode.UNSET


async def test_a_chat_is_a_chat_and_neutral_settings_are_left_out(trace):
    async with fake().engine() as engine:
        trace_engine(engine, trace.provider)
        await engine.chat([{"role": "user", "content": "1 2"}], max_tokens=2).result()
    span = trace.span()
    assert span.name == "chat asyncllm/demo"
    assert span.attributes["gen_ai.operation.name"] == "chat"
    for name in ("top_k", "presence_penalty", "frequency_penalty", "stop_sequences"):
        assert f"gen_ai.request.{name}" not in span.attributes


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1, None])
async def test_seeds_fit_into_a_signed_attribute(trace, seed):
    rig = fake(record=True)
    async with rig.engine() as engine:
        trace_engine(engine, trace.provider)
        await engine.generate([1], max_tokens=1, seed=seed)
    recorded = trace.span().attributes["gen_ai.request.seed"]
    assert -(2**63) <= recorded < 2**63
    used = rig.executor.batches[0].assignments[0].sampling.seed
    assert recorded % 2**64 == used


async def test_span_has_callers_parent_and_request_times(trace):
    async with fake(step_time=0.002).engine() as engine:
        trace_engine(engine, trace.provider)
        with trace.tracer.start_as_current_span("outer") as outer:
            before = time.time_ns()
            stream = engine.stream([1], max_tokens=4)
        usage = (await stream.result()).usage
    span = trace.span()
    assert span.parent.span_id == outer.get_span_context().span_id
    assert span.context.trace_id == outer.get_span_context().trace_id
    assert span.end_time - span.start_time == pytest.approx(usage.total_time * 1e9, abs=2)
    assert abs(span.start_time - before) < 5e9
    (event,) = span.events
    assert event.name == "gen_ai.first_token"
    assert event.timestamp - span.start_time == pytest.approx(usage.ttft * 1e9, abs=2)
    # Read long after it ended, or never: the span is that of the request.
    assert span.start_time < event.timestamp < span.end_time


async def test_an_abort_is_no_error(trace):
    rig = fake(gate=0)
    async with rig.engine() as engine:
        trace_engine(engine, trace.provider)
        stream = engine.stream([1])
        stream.abort()
        rig.executor.gate.release(10)
        await stream.result()
    span = trace.span()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert span.status.status_code is StatusCode.UNSET
    assert "error.type" not in span.attributes


async def test_errors_have_their_type_and_no_text(trace):
    rig = fake()
    rig.executor.row_errors["bad"] = ValueError("the secret text")
    rig.executor.faults[3] = RuntimeError("another secret")
    async with rig.engine() as engine:
        trace_engine(engine, trace.provider)
        with pytest.raises(RequestError, match="secret text"):
            await engine.generate([1], request_id="bad")
        with pytest.raises(EngineDeadError):
            await engine.generate([1], max_tokens=100)
    assert [s.attributes["error.type"] for s in trace.spans()] == [
        "RequestError",
        "EngineDeadError",
    ]
    for span in trace.spans():
        assert span.status.status_code is StatusCode.ERROR
        assert "finish_reasons" not in str(dict(span.attributes))
        assert "secret" not in span.to_json()


async def test_no_text_is_recorded_by_default(trace):
    async with fake().engine() as engine:
        trace_engine(engine, trace.provider)
        result = await engine.generate("000000123 456", max_tokens=3)
        await engine.chat([{"role": "user", "content": "000000123 4"}], max_tokens=3).result()
    assert result.prompt_token_ids == (123, 456)
    for span in trace.spans():
        assert not any("messages" in name for name in span.attributes)
        assert "000000123" not in span.to_json()
        assert result.text not in span.to_json()


async def test_texts_are_recorded_on_demand(trace):
    rig = fake()
    async with rig.engine() as engine:
        trace_engine(engine, trace.provider, capture_content=True)
        result = await engine.generate("123 456", max_tokens=3)
        await engine.generate([123, 456], max_tokens=3)
        messages = [
            {"role": "system", "content": "1"},
            {"role": "user", "content": "2"},
        ]
        await engine.chat(messages, max_tokens=3).result()
        rig.executor.row_errors["bad"] = ValueError("why it failed")
        with pytest.raises(RequestError):
            await engine.generate([1], request_id="bad")
    text, ids, chat, bad = trace.spans()

    def part(content):
        return [{"type": "text", "content": content}]

    def read(span, name):
        return json.loads(span.attributes[f"gen_ai.{name}.messages"])

    assert read(text, "input") == [{"role": "user", "parts": part("123 456")}]
    assert read(text, "output") == [
        {"role": "assistant", "parts": part(result.text), "finish_reason": "length"}
    ]
    assert read(ids, "input") == [{"role": "user", "parts": part("123 456 ")}]
    assert read(chat, "input") == [
        {"role": "system", "parts": part("1")},
        {"role": "user", "parts": part("2")},
    ]
    assert "why it failed" in bad.status.description
    assert read(bad, "output")[0]["finish_reason"] == "error"


async def test_close_ends_open_spans(trace):
    async with fake().engine() as engine:
        with EngineTracing(engine, trace.provider) as tracing:
            await engine.pause()
            stream = engine.stream([1], max_tokens=2)
        tracing.close()
        await engine.resume()
        await stream.result()
        await engine.generate([2], max_tokens=1)
    assert len(trace.spans()) == 1


async def test_a_failing_exporter_hurts_no_request(trace, caplog):
    rig = fake()
    async with rig.engine() as engine:
        tracing = trace_engine(engine, trace.provider)

        def broken(*args, **kwargs):
            raise OSError("no collector")

        tracing._tracer.start_span = broken
        result = await engine.generate([1], max_tokens=3)
    assert list(result.token_ids) == rig.executor.reference([1], 3)
    assert "EngineTracing.on_submit" in caplog.text
    assert caplog.text.count("an observer failed") == 1


async def test_a_sampler_that_drops_spans_costs_no_description():
    trace = Trace(sampler=ALWAYS_OFF)
    async with fake().engine() as engine:
        tracing = trace_engine(engine, trace.provider)
        await engine.generate([1], max_tokens=3)
        assert tracing._open_spans == {}
    assert trace.spans() == []


async def test_without_a_provider_nothing_happens():
    async with fake().engine() as engine:
        trace_engine(engine)
        assert (await engine.generate([1], max_tokens=2)).finish_reason == "length"


async def test_without_the_extra_the_error_names_it():
    said = import_error("asyncllm.tracing", without="opentelemetry")
    assert "pip install 'asyncllm[tracing]'" in said
