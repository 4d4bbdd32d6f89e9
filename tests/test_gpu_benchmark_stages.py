"""The decode and the engine stage of the GPU benchmarks on the CPU: all but what only CUDA
can tell. No time is asserted."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from asyncllm.gpu.graph.cuda_graphs import EagerCapturer, GraphKey, Part
from asyncllm.gpu.ops.triton.attention import TritonAttention, TritonPlan
from asyncllm.runtime.loading import load_model
from benchmarks.gpu import baselines, decode, engine, probe
from benchmarks.gpu.clock import Clock, CudaClock
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.paged_inputs import decode_calls, inputs_bytes, make_inputs, prefill_calls
from benchmarks.gpu.probe import GraphCost, StepRecord, graph_costs, steady_steps
from benchmarks.gpu.shapes import AttentionLoad
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.streams import UtilizationMeter
from tests.gpu_stand_ins import TINY, HostClock, figures, make_stage, tiny_plan
from tests.static_runner import LateStream, TraceRecorder, make_decoder, make_runner
from tests.triton.paged import assert_close, attend, plain_attention

# --- the decode stage -------------------------------------------------------------------

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 32}


class PlainAttention(TritonAttention):
    """The backend with its kernels replaced by plain attention."""

    def __init__(self) -> None:
        load = AttentionLoad(1, 1, 0, **SMALL)
        shape = decode.AttentionShape(load.heads, load.kv_heads, load.head_dim, load.head_dim**-0.5)
        device = torch.device("cpu")
        super().__init__(shape, torch.bfloat16, device, capability=90, num_sms=132)
        self.lengths: list[int] = []

    def __call__(self, q, k, v, cache, plan: TritonPlan):
        self.lengths += plan.seq_lens.tolist()
        return plain_attention(q, cache, plan, self.shape.scale)


def plain_varlen(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    num_splits=None,
):
    assert window_size == (-1, 0)
    assert (enable_gqa, num_splits) == (True, 1)
    out = []
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(cu_seq_q.tolist()),
        itertools.pairwise(cu_seq_k.tolist()),
        strict=True,
    ):
        assert (q1 - q0, k1 - k0) == (max_q, max_k)
        scale = query.shape[-1] ** -0.5
        out.append(attend(query[q0:q1], key[k0:k1], value[k0:k1], scale, None, None))
    return torch.cat(out).to(query.dtype)


@pytest.fixture
def varlen(monkeypatch):
    module = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(module, "varlen_attn", plain_varlen)


CPU = torch.device("cpu")


def test_inputs_are_distinct_and_share_no_block():
    load = AttentionLoad(3, 1, 47, **SMALL)
    inputs = make_inputs(load, 4, CPU)
    blocks = inputs.tables[:-1].flatten().tolist()
    assert sorted(blocks) == list(range(1, 4 * 3 * 3 + 1))
    assert inputs.tables[:-1].tolist() != torch.arange(1, 37).view(-1, 3).tolist()
    assert inputs.tables[-1].tolist() == [0, 0, 0]
    assert inputs.cache.shape == (2, 37, 16, 2, 32)
    assert len({float(q.float().sum()) for q in inputs.queries}) == 4
    assert inputs_bytes(load, 4) == 4 * load.bytes + load.kv_bytes


@pytest.mark.parametrize("queries", [1, 24])
def test_launches_and_baseline_attend_to_the_same(varlen, queries):
    load = AttentionLoad(2, queries, 64 - queries, **SMALL)
    inputs = make_inputs(load, 3, CPU)
    attention = PlainAttention()
    if queries == 1:
        calls = decode_calls(attention, inputs, 4096)
    else:
        calls = prefill_calls(attention, inputs)
    others = baselines.varlen_calls(inputs, gather=True)
    outputs = [call() for call in calls]
    for output, other in zip(outputs, others, strict=True):
        assert_close(output.view(-1, 4, 32), other().double(), torch.bfloat16)
    assert not torch.equal(outputs[0], outputs[1])
    alone = baselines.varlen_calls(inputs, gather=False)[0]()
    assert torch.equal(alone, others[0]())
    assert set(attention.lengths) == {64}


def test_varlen_gets_the_options_that_it_has():
    parameters = inspect.signature(plain_varlen).parameters
    assert baselines.varlen_options(parameters) == {"num_splits": 1, "enable_gqa": True}
    assert baselines.varlen_options({"scale": None}) == {}


def test_varlen_needs_whole_blocks(varlen):
    with pytest.raises(ValueError, match="whole blocks"):
        baselines.varlen_calls(make_inputs(AttentionLoad(1, 1, 50, **SMALL), 1, CPU), gather=True)


def test_decode_bench(varlen, capsys):
    stage = make_stage()
    bench = decode.DecodeBench(
        stage, HostClock(), PlainAttention(), cache=10_000, memory=10_000_000
    )
    bench.measure_copy()
    load = AttentionLoad(2, 1, 63, **SMALL)
    bench.measure_decode(load)
    bench.measure_prefill(AttentionLoad(1, 32, 32, **SMALL))
    bench.score()
    found = figures(stage)
    assert found["copy, read and written"] == 0.01
    for name in (
        "decode 2 × 64",
        "  decode 2 × 64, 1 splits",
        "  decode 2 × 64, gather + varlen_attn",
        "prefill 32 after 32",
        "  prefill 32 after 32, gather + varlen_attn",
        "  prefill 32 after 32, varlen_attn alone",
    ):
        assert found[name] > 0, name
    notes = {figure.name: figure.note for figure in stage.report.figures}
    assert notes["decode 2 × 64"].endswith("of copy bandwidth, 119 splits")
    assert "TOO FAR" not in " ".join(notes.values())
    # Nothing was past LARGE.
    assert found["decode attention past 64k tokens, of copy bandwidth"] is None


def test_decode_bench_scores_the_worst_of_the_large(monkeypatch):
    monkeypatch.setattr(decode, "LARGE", 100)
    stage = make_stage()
    bench = decode.DecodeBench(
        stage, HostClock(), PlainAttention(), cache=10_000, memory=10_000_000
    )
    for batch in (2, 3):
        bench.measure_decode(AttentionLoad(batch, 1, 63, **SMALL))
    assert set(bench.shares) == {"decode 2 × 64", "decode 3 × 64"}
    bench.score()
    score, goal = stage.scores.scores[-1]
    assert score.value == min(bench.shares.values())
    assert goal == Goal("at least", 0.75)


def test_what_does_not_fit_is_left_out_and_said():
    stage = make_stage()
    bench = decode.DecodeBench(stage, HostClock(), PlainAttention(), cache=10, memory=1000)
    bench.measure_decode(AttentionLoad(2, 1, 63, **SMALL))
    assert [(f.name, f.value) for f in stage.report.figures] == [("decode 2 × 64", None)]
    assert "do not fit" in stage.report.figures[0].note


def test_a_baseline_that_computes_something_else_is_named():
    one = torch.ones(4, 8)
    assert decode.difference(one, one.view(8, 4)) == "outputs differ by 0.0e+00"
    assert decode.difference(one * 1.1, one).endswith("TOO FAR")


# --- the engine stage -------------------------------------------------------------------


def test_engine_stage_on_the_cpu(capsys):
    stage = make_stage()
    clock = HostClock()
    engine.run(stage, clock, tiny_plan())
    assert (stage.failed, stage.skipped) == ([], [])
    assert clock.released == 8
    found = figures(stage)
    for name in (
        "start, random weights and capture",
        "tiny Qwen, batch 1, step",
        "tiny Qwen, batch 4, over the floor",
        "engine thread, CPU time a step",
        "loop lag, p99",
        "throughput",
        "time to first token",
        "GPU busy, 4 streams, from a trace",
        "tiny Llama, batch 2, step",
        "batch 4, not ahead over ahead",
    ):
        assert found[name] > 0, name
    for name in ("capture of all buckets", "batch sizes of 0 with other tokens"):
        assert found[name] is None
    assert found["memory left by the second open and close"] == 0
    verdicts = {
        figure.name: goal.met(figure.value)
        for figure, goal in stage.scores.scores
        if figure.value is not None
    }
    assert verdicts["tiny Qwen, batch 1, over the floor"]
    assert not verdicts["tiny Llama, batch 2, over the floor"]
    assert stage.finish() == 0
    assert "goals" in capsys.readouterr().out


def run_part(part: str, stage: Stage, clock: Clock, directory: Path) -> None:
    bench = engine.EngineBench(stage, clock, tiny_plan(), directory)
    engine.asyncio.run(getattr(bench, part)())


def test_captured_and_eager_tokens_are_compared(tmp_path, monkeypatch):
    """With every batch size of a runner that captures; the CPU's is eager in both."""
    buckets = (1, 2, 5)
    monkeypatch.setattr(engine, "graph_costs", lambda opened: (buckets, []))
    stage = make_stage()
    run_part("compare_graphs", stage, HostClock(), tmp_path)
    assert figures(stage) == {"batch sizes of 3 with other tokens": 0.0}


@pytest.fixture
def graphs_on_the_cpu(monkeypatch):
    """Engines of the stage run ahead and repeat traces of their steps, as on a GPU; "off" is
    the same device, step by step."""

    def load(config, progress):
        loaded = load_model(config, progress)
        model = loaded.model_config
        capturer = EagerCapturer() if config.cuda_graphs == "off" else TraceRecorder()
        runner = make_runner(make_decoder(model), capturer=capturer, stream=LateStream())
        loaded.executor.close()
        return dataclasses.replace(loaded, executor=runner)

    monkeypatch.setattr(probe, "load_model", load)


def test_a_runner_with_graphs_is_compared_in_each_of_its_sizes(graphs_on_the_cpu, tmp_path):
    stage = make_stage()
    run_part("compare_graphs", stage, HostClock(), tmp_path)
    assert stage.failed == []
    assert figures(stage) == {"batch sizes of 4 with other tokens": 0.0}


def test_what_a_runner_captured_is_reported(graphs_on_the_cpu, tmp_path):
    async def main(stage):
        bench = engine.EngineBench(stage, HostClock(), tiny_plan(), tmp_path)
        async with bench.opened(TINY) as opened:
            await bench.tokens_of(opened, TINY, 3)
            await bench.measure_steps(opened, TINY, 1, None)
            buckets, costs = graph_costs(opened)
            bench.report_capture(opened)
        return buckets, costs

    stage = make_stage()
    buckets, costs = engine.asyncio.run(main(stage))
    assert buckets == (1, 2, 4, 8)
    assert [(cost.bucket, cost.part) for cost in costs] == [(8, "step"), (4, "step"), (1, "step")]
    found = figures(stage)
    assert found["graph of 4 rows, step"] == costs[1].seconds
    assert found["capture of all buckets"] == sum(cost.seconds for cost in costs) > 0
    assert found["tiny Qwen, batch 1, step"] > 0


def test_other_tokens_are_counted(tmp_path, monkeypatch):
    calls = []

    async def tokens_of(self, opened, shape, batch):
        calls.append(batch)
        late = len(calls) > 3
        return [(i, late and batch > 1 and i == 0) for i in range(batch)]

    monkeypatch.setattr(engine, "graph_costs", lambda opened: ((1, 2, 5), []))
    monkeypatch.setattr(engine.EngineBench, "tokens_of", tokens_of)
    stage = make_stage()
    run_part("compare_graphs", stage, HostClock(), tmp_path)
    assert figures(stage) == {"batch sizes of 3 with other tokens": 2.0}
    assert stage.report.figures[-1].note.endswith("1 of 2 rows, 1 of 5 rows")


def test_requests_of_the_comparison_fill_the_batch(tmp_path):
    async def main():
        bench = engine.EngineBench(make_stage(), HostClock(), tiny_plan(), tmp_path)
        async with bench.opened(TINY) as opened:
            tokens = await bench.tokens_of(opened, TINY, 3)
            records = engine.probe_of(opened).records
        return tokens, records

    tokens, records = engine.asyncio.run(main())
    assert [len(row) for row in tokens] == [8, 8, 8]
    assert [record.rows for record in records] == [3] * 8
    assert [record.tokens for record in records] == [48] + [3] * 7
    assert [record.context for record in records] == [48 + 3 * i for i in range(8)]


def test_a_leak_is_no(tmp_path):
    stage = make_stage()
    run_part("measure_memory", stage, HostClock(leak=1 << 20), tmp_path)
    score, goal = stage.scores.scores[-1]
    assert score.name == "memory left by the second open and close"
    assert score.value == 2.0
    assert not goal.met(score.value)


def test_the_drivers_figure_has_the_goal_where_there_is_one(tmp_path):
    async def main(stage):
        bench = engine.EngineBench(stage, HostClock(utilization=0.98), tiny_plan(), tmp_path)
        bench._busy = 0.98
        async with bench.opened(TINY) as opened:
            await bench.measure_busy(opened, TINY)

    stage = make_stage()
    engine.asyncio.run(main(stage))
    assert figures(stage) == {"GPU busy, 4 streams, from a trace": 0.5}
    assert stage.scores.scores == []


def test_utilization_is_asked_until_there_is_no_answer():
    answers = iter([0.5, 1.0, None])
    clock = SimpleNamespace(utilization=lambda: next(answers))
    meter = UtilizationMeter(clock)
    engine.asyncio.run(meter.run())
    assert meter.values == [0.5, 1.0]


def test_the_stand_in_has_what_a_clock_has():
    for name in vars(Clock):
        if not name.startswith("_"):
            assert callable(getattr(CudaClock, name))
            wanted = inspect.signature(getattr(Clock, name)).parameters
            assert list(inspect.signature(getattr(HostClock, name)).parameters) == list(wanted)


def test_graph_costs_are_the_runners(monkeypatch):
    records = [
        SimpleNamespace(key=GraphKey(8), seconds=0.5, num_bytes=100),
        SimpleNamespace(key=GraphKey(8, Part.FORWARD), seconds=0.25, num_bytes=50),
    ]
    graphs = SimpleNamespace(buckets=(1, 8), captured=records)
    runner = SimpleNamespace(graphs=graphs)
    probe = SimpleNamespace(inner=runner)
    monkeypatch.setattr("benchmarks.gpu.probe.probe_of", lambda opened: probe)
    assert graph_costs(None) == (
        (1, 8),
        [GraphCost(8, "step", 0.5, 100), GraphCost(8, "forward", 0.25, 50)],
    )
    graphs.buckets = ()
    assert graph_costs(None) is None
    runner.graphs = None
    assert graph_costs(None) is None


def test_capture_is_summed(tmp_path, monkeypatch):
    costs = [GraphCost(8, "step", 0.5, 2**29), GraphCost(1, "step", 0.25, 2**28)]
    monkeypatch.setattr(engine, "graph_costs", lambda opened: ((1, 8), costs))
    stage = make_stage()
    engine.EngineBench(stage, HostClock(), tiny_plan(), tmp_path).report_capture(None)
    found = figures(stage)
    assert found["graph of 8 rows, step"] == 0.5
    assert found["capture of all buckets"] == 0.75
    assert found["memory of all graphs"] == 0.75


def test_steady_steps_are_those_between_equal_decode_steps():
    rows = [(2, 2), (2, 9), (2, 2), (2, 2), (1, 1), (2, 2), (2, 2), (2, 2)]
    records = [
        StepRecord(r, t, 10 * i, returned_at=float(i * i), cpu_time=i / 10)
        for i, (r, t) in enumerate(rows)
    ]
    steps = steady_steps(records, 2)
    assert [step.seconds for step in steps] == [5.0, 11.0, 13.0]
    assert [step.context for step in steps] == [30, 60, 70]
    assert [step.cpu_time for step in steps] == pytest.approx([0.1] * 3)
    assert steady_steps(records, 3) == []
