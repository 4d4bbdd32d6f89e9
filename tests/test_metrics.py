"""Metrics: names, labels, buckets, values and registries."""

from __future__ import annotations

import asyncio
import gc
import threading

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncllm import DeadlineExceededError, EngineOverloadedError, InvalidRequestError
from asyncllm.metrics import EngineMetrics
from asyncllm.outputs import Usage
from tests.fakes import fake
from tests.idle import until
from tests.metric_samples import samples
from tests.missing_package import import_error


def buckets(metrics, name):
    """Upper bound to how many are at most that."""
    return {
        dict(key[1:])["le"]: value
        for key, value in samples(metrics).items()
        if key[0] == f"{name}_bucket"
    }


class Request:
    """What a histogram reads of a request."""

    def __init__(self, reason="stop", max_tokens=None):
        self.finish_reason = reason
        self.arrived_at = 100.0
        self.first_token_at = 100.75
        self.sampling = type("Sampling", (), {"max_tokens": max_tokens, "n": 1})


async def test_requests_are_counted_by_how_they_end():
    rig = fake()
    async with rig.engine() as engine:
        metrics = EngineMetrics(engine)
        await engine.generate([1, 2, 3], max_tokens=5)
        stop = rig.executor.reference([4], 3)
        await engine.generate([4], stop_token_ids=[stop[-1]], max_tokens=90)
        await engine.pause()
        aborted = engine.stream([5], max_tokens=200)
        aborted.abort()
        await engine.resume()
        await aborted.result()
        rig.executor.row_errors["bad"] = ValueError("no")
        with pytest.raises(Exception, match="no"):
            await engine.generate([6], request_id="bad")
        got = samples(metrics)
    stem = "asyncllm:request_success_total"
    counts = {dict(k[1:])["finished_reason"]: v for k, v in got.items() if k[0] == stem}
    assert counts == {"stop": 1, "length": 1, "tool_calls": 0, "abort": 1, "error": 1}
    assert got["asyncllm:request_errors_total", ("error_type", "RequestError")] == 1
    assert got["asyncllm:request_generation_tokens_sum",] >= 8
    assert got["asyncllm:request_generation_tokens_count",] == 4
    assert got["asyncllm:request_params_max_tokens_count",] == 3
    assert got["asyncllm:request_params_max_tokens_sum",] == 5 + 90 + 200


async def test_metrics_have_finished_request_before_reader_sees_end():
    async with fake().engine() as engine:
        metrics = EngineMetrics(engine)
        for i in range(1, 50):
            await engine.generate([i], max_tokens=1)
            assert samples(metrics)["asyncllm:e2e_request_latency_seconds_count",] == i


async def test_gauges_and_counters_are_the_engines_own():
    async with fake(num_blocks=11, block_size=4, max_num_seqs=2).engine(
        max_queued_requests=2
    ) as engine:
        metrics = EngineMetrics(engine)
        await engine.generate(list(range(12)), max_tokens=1)
        await engine.generate(list(range(12)), max_tokens=1)
        await engine.pause()
        streams = [engine.stream([i] * 5, max_tokens=4) for i in range(2)]
        with pytest.raises(EngineOverloadedError):
            engine.stream([9])
        waiting = samples(metrics)
        await engine.resume()
        slow = await engine.submit([7, 7], max_tokens=30, max_unread=2, on_slow="pause")
        for stream in streams:
            await stream.result()
        await until(lambda: engine.stats().num_paused)
        paused, stats = samples(metrics), engine.stats()
        await slow.aclose()
    assert waiting["asyncllm:num_requests_waiting",] == 2
    assert waiting["asyncllm:num_requests_running",] == 0
    assert waiting["asyncllm:requests_rejected_total",] == 1
    assert waiting["asyncllm:prefix_cache_queries_total",] == 24
    assert waiting["asyncllm:prefix_cache_hits_total",] == 8
    assert waiting["asyncllm:prompt_tokens_total",] == 24
    assert waiting["asyncllm:generation_tokens_total",] == 2
    assert paused["asyncllm:num_requests_paused",] == 1
    assert paused["asyncllm:kv_cache_usage_perc",] == pytest.approx(stats.kv_cache_usage)
    assert paused["asyncllm:kv_cache_usage_perc",] == pytest.approx(1 / 10)
    assert paused["asyncllm:generation_tokens_total",] == stats.generation_tokens


async def test_preemptions_are_counted():
    async with fake(num_blocks=12, block_size=4, max_model_len=40).engine() as engine:
        metrics = EngineMetrics(engine)
        await asyncio.gather(*(engine.generate([i] * 3, max_tokens=25) for i in range(6)))
        assert samples(metrics)["asyncllm:num_preemptions_total",] > 0


async def test_histograms_hold_the_times_of_the_usage():
    engine = fake().engine()
    metrics = EngineMetrics(engine, compat="vllm")
    (observer,) = engine._observers.registered
    usage = Usage(
        prompt_tokens=100,
        completion_tokens=11,
        cached_tokens=0,
        queue_time=0.5,
        ttft=0.75,
        total_time=1.75,
    )
    request = Request(max_tokens=64)
    observer.on_first_token(request)
    observer.on_finish(request, usage, None)
    got = samples(metrics)
    sums = {
        "time_to_first_token_seconds": (0.75, 1),
        "inter_token_latency_seconds": (1.0, 10),
        "request_time_per_output_token_seconds": (0.1, 1),
        "e2e_request_latency_seconds": (1.75, 1),
        "request_queue_time_seconds": (0.5, 1),
        "request_prefill_time_seconds": (0.25, 1),
        "request_decode_time_seconds": (1.0, 1),
        "request_inference_time_seconds": (1.25, 1),
        "request_prompt_tokens": (100, 1),
        "request_generation_tokens": (11, 1),
        "request_max_num_generation_tokens": (11, 1),
        "request_params_max_tokens": (64, 1),
        "request_params_n": (1, 1),
    }
    for name, (total, count) in sums.items():
        assert got[f"vllm:{name}_sum",] == pytest.approx(total), name
        assert got[f"vllm:{name}_count",] == count, name
    # A bucket holds what is at most its bound.
    latency = buckets(metrics, "vllm:request_queue_time_seconds")
    assert (latency["0.3"], latency["0.5"], latency["0.8"], latency["+Inf"]) == (0, 1, 1, 1)
    tokens = buckets(metrics, "vllm:request_prompt_tokens")
    assert (tokens["50.0"], tokens["100.0"], tokens["200.0"]) == (0, 1, 1)


async def test_time_to_first_token_is_available_before_end():
    async with fake(step_time=0.001).engine() as engine:
        metrics = EngineMetrics(engine)
        stream = engine.stream([1], max_tokens=200)
        await anext(stream)
        got = samples(metrics)
        assert got["asyncllm:time_to_first_token_seconds_count",] == 1
        assert got["asyncllm:e2e_request_latency_seconds_count",] == 0
        stream.abort()
        ttft = (await stream.result()).usage.ttft
        got = samples(metrics)
        assert got["asyncllm:time_to_first_token_seconds_count",] == 1
        assert got["asyncllm:time_to_first_token_seconds_sum",] == pytest.approx(ttft)


async def test_a_request_without_tokens_has_no_token_times():
    engine = fake().engine()
    metrics = EngineMetrics(engine)
    (observer,) = engine._observers.registered
    observer.on_finish(Request("abort"), Usage(3, 0, 0, 0.1, None, 0.1), None)
    got = samples(metrics)
    for name in ("time_to_first_token", "request_decode_time", "request_prefill_time"):
        assert got[f"asyncllm:{name}_seconds_count",] == 0
    assert got["asyncllm:inter_token_latency_seconds_count",] == 0
    assert got["asyncllm:request_queue_time_seconds_count",] == 1


async def test_deadlines_are_told_apart_from_other_errors():
    rig = fake(gate=0)
    async with rig.engine() as engine:
        metrics = EngineMetrics(engine)
        stream = engine.stream([1], timeout=0.02)
        await asyncio.sleep(0.03)
        rig.executor.gate.release(1000)
        with pytest.raises(DeadlineExceededError):
            await stream.result()
        got = samples(metrics)
    assert got["asyncllm:request_errors_total", ("error_type", "DeadlineExceededError")] == 1


DASHBOARD = """
    vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
    vllm:prompt_tokens_total vllm:generation_tokens_total vllm:num_preemptions_total
    vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
    vllm:request_success_total
    vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
    vllm:e2e_request_latency_seconds_count
    vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_sum
    vllm:request_time_per_output_token_seconds_bucket
    vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
    vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
    vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
    vllm:request_decode_time_seconds_sum vllm:request_inference_time_seconds_sum
    vllm:request_max_num_generation_tokens_sum vllm:request_params_max_tokens_bucket
    vllm:request_params_n_bucket
""".split()


async def test_vllm_names_labels_and_buckets():
    engine = fake().engine(model="some/model")
    metrics = EngineMetrics(engine, compat="vllm")
    families = list(text_string_to_metric_families(metrics.render().decode()))
    names = {sample.name for family in families for sample in family.samples}
    assert set(DASHBOARD) <= names
    assert not any(name.startswith("asyncllm:") and name[9:] in DASHBOARD for name in names)
    for family in families:
        for sample in family.samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("some/model", "0")
    bounds = buckets(metrics, "vllm:e2e_request_latency_seconds")
    assert list(bounds)[:4] == ["0.3", "0.5", "0.8", "1.0"]
    assert list(bounds)[-2:] == ["7680.0", "+Inf"]
    assert "2560.0" in buckets(metrics, "vllm:time_to_first_token_seconds")
    assert "80.0" in buckets(metrics, "vllm:inter_token_latency_seconds")


async def test_own_names_have_the_same_stems_and_finer_buckets():
    ours, theirs = (
        {name.partition(":")[2] for name, *_ in samples(EngineMetrics(fake().engine(), compat=c))}
        for c in (None, "vllm")
    )
    assert ours == theirs
    metrics = EngineMetrics(fake().engine())
    assert {name.partition(":")[0] for name, *_ in samples(metrics)} == {"asyncllm"}
    assert next(iter(buckets(metrics, "asyncllm:e2e_request_latency_seconds"))) == "0.001"


async def test_labels_are_added_and_the_model_may_be_renamed():
    metrics = EngineMetrics(
        fake().engine(), labels={"model_name": "mia", "zone": 'eu "west"\nnorth'}
    )
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "mia"
            assert sample.labels["zone"] == 'eu "west"\nnorth'


@pytest.mark.parametrize(
    "labels", [{"engine": "1"}, {"le": "1"}, {"a-b": "1"}, {"__x": "1"}, {"a": 1}, {"ü": "1"}]
)
async def test_bad_labels_are_refused(labels):
    engine = fake().engine()
    with pytest.raises(InvalidRequestError) as caught:
        EngineMetrics(engine, labels=labels)
    assert caught.value.param == "labels"
    assert engine._observers.registered == ()


async def test_bad_compat_and_no_engine_are_refused():
    with pytest.raises(InvalidRequestError, match="compat='sglang'"):
        EngineMetrics(fake().engine(), compat="sglang")
    with pytest.raises(InvalidRequestError, match="at least one"):
        EngineMetrics([])


async def test_nothing_is_in_the_global_registry_unless_asked_for():
    before = prometheus_client.generate_latest()
    metrics = EngineMetrics(fake().engine())
    assert b"asyncllm" not in prometheus_client.generate_latest()
    assert prometheus_client.generate_latest().count(b"# TYPE") == before.count(b"# TYPE")
    metrics.close()
    public = EngineMetrics(fake().engine(), registry=prometheus_client.REGISTRY)
    assert b"asyncllm:num_requests_running" in prometheus_client.generate_latest()
    public.close()
    assert b"asyncllm" not in prometheus_client.generate_latest()


async def test_engines_together_are_told_apart_by_a_label():
    one, two = fake(), fake()
    async with one.engine() as a, two.engine(model="b") as b:
        metrics = EngineMetrics([a, b])
        await a.generate([1], max_tokens=3)
        await b.generate([1], max_tokens=4)
        text = metrics.render().decode()
    assert 'asyncllm:generation_tokens_total{engine="0",model_name="asyncllm/demo"} 3.0' in text
    assert 'asyncllm:generation_tokens_total{engine="1",model_name="b"} 4.0' in text
    assert text.count("# TYPE asyncllm:generation_tokens_total ") == 1


async def test_a_registry_takes_the_same_metrics_once():
    registry = prometheus_client.CollectorRegistry()
    first = EngineMetrics(fake().engine(), registry=registry)
    other = fake().engine()
    with pytest.raises(ValueError, match="Duplicated"):
        EngineMetrics(other, registry=registry)
    assert other._observers.registered == ()
    first.close()
    EngineMetrics(other, registry=registry).close()


async def test_closed_metrics_count_no_more():
    async with fake().engine() as engine:
        metrics = EngineMetrics(engine)
        await engine.generate([1], max_tokens=1)
        metrics.close()
        metrics.close()
        await engine.generate([1], max_tokens=1)
        assert metrics.render() == b""
        (record,) = metrics._observers
        assert record.num_finished["length"] == 1


async def test_a_closed_engine_keeps_its_counts_and_has_nothing_live():
    engine = fake().engine()
    metrics = EngineMetrics(engine)
    assert samples(metrics)["asyncllm:generation_tokens_total",] == 0
    async with engine:
        engine.stream([1], max_tokens=5, request_id="x")
        await engine.generate([1], max_tokens=5)
        assert samples(metrics)["asyncllm:generation_tokens_total",] >= 5
    got = samples(metrics)
    assert got["asyncllm:generation_tokens_total",] >= 5
    assert got["asyncllm:num_requests_running",] == 0
    assert got["asyncllm:kv_cache_usage_perc",] == 0
    assert got["asyncllm:request_success_total", ("finished_reason", "length")] >= 1
    del engine
    gc.collect()
    assert samples(metrics) == got


async def test_scraping_while_requests_end_never_tears():
    """A histogram's count is its last bucket, also where a request ends during the scrape."""
    async with fake().engine() as engine:
        metrics = EngineMetrics(engine)
        done = threading.Event()
        torn = []

        def scrape():
            while not done.is_set():
                got = samples(metrics)
                ended = sum(v for k, v in got.items() if k[0] == "asyncllm:request_success_total")
                if got["asyncllm:request_prompt_tokens_count",] != ended:
                    torn.append(got)

        thread = threading.Thread(target=scrape)
        thread.start()
        for _ in range(10):
            await asyncio.gather(*(engine.generate([i], max_tokens=2) for i in range(20)))
        done.set()
        await asyncio.to_thread(thread.join)
        assert torn == []
        assert samples(metrics)["asyncllm:request_prompt_tokens_count",] == 200


async def test_without_the_extra_the_error_names_it():
    said = import_error("asyncllm.metrics", without="prometheus_client")
    assert "pip install 'asyncllm[metrics]'" in said
