"""The decode and the engine stage of the GPU benchmarks on the CPU: all but what only CUDA
can tell. No time is asserted."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from asyncllm.gpu.ops.triton.attention import TritonAttention, TritonPlan
from benchmarks.gpu import baselines, decode, engine
from benchmarks.gpu.paged_inputs import decode_calls, make_inputs, prefill_calls
from benchmarks.gpu.shapes import AttentionLoad
from tests.gpu_stand_ins import HostClock, figures, make_stage, tiny_plan
from tests.triton.paged import assert_close, attend, plain_attention

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
