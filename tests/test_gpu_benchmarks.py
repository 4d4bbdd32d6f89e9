"""The GPU benchmarks on the CPU: files, the command line, and the stages kernels, mixed, profile,
decode, engine, tune and smoke. No time is asserted."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asyncllm import EngineConfig
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.attention_plan import TritonPlan
from asyncllm.gpu.ops.triton.tuning import Tiles
from benchmarks.common import Report
from benchmarks.gpu import decode, engine, kernels, smoke, smoke_probes, tune
from benchmarks.gpu.clock import DeviceSpan
from benchmarks.gpu.mixed import MixedBench, MixedPlan
from benchmarks.gpu.profile import ProfileBench, ProfilePlan
from benchmarks.gpu.shapes import AttentionLoad
from benchmarks.gpu.smoke_kernels import checks_of
from benchmarks.gpu.smoke_models import MODELS
from benchmarks.gpu.stage import Deadline, Stage
from benchmarks.gpu.tune import Sweep, TunePlan
from benchmarks.gpu.tune_compile import Compiled, CompileJob, TunedAttention, compile_all
from tests.gpu_stand_ins import TINY, HostClock, figures, make_stage, tiny_plan
from tests.processes import python
from tests.triton.paged import attend, plain_attention

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def test_figures_are_written_after_every_measurement(tmp_path, monkeypatch):
    out, file = tmp_path / "found", tmp_path / "found" / "decode.json"
    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/gpu/__main__.py", "--out", str(out)])
    conditions = {"gpu": "a GPU", "driver": "1"}
    stage = Stage(Report("test", conditions), Deadline(9), name="decode", out=out)
    stage.attempt("one", 1, lambda: stage.report.add("figure", 1.5, "s"))
    stage.write("tables", {"best": [1, 2]})
    assert json.loads((out / "decode-tables.json").read_text()) == {"best": [1, 2]}
    written = json.loads(file.read_text())
    assert written["figures"] == [{"name": "figure", "value": 1.5, "unit": "s", "note": ""}]
    assert written["machine"]["gpu"] == "a GPU"
    assert written["machine"]["driver"] == "1"
    assert written["command"] == "python -m benchmarks.gpu --out found"
    assert str(tmp_path) not in file.read_text()


@pytest.mark.slow
def test_the_command_refuses_without_a_gpu():
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = python("-m", "benchmarks.gpu", "--stage", "kernels", cwd=ROOT, env=hidden)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "needs an NVIDIA GPU" in done.stderr


def test_a_wrong_kernel_is_counted_and_named(capsys):
    def wrong() -> None:
        raise AssertionError("row 3: 1 of 8 vectors are off")

    stage = make_stage()
    family = kernels.Family("norms", {"a": lambda: None, "b": wrong, "c": lambda: None})
    kernels.run_families(stage, [family])
    assert figures(stage)["norms, wrong"] == 1.0
    assert stage.report.figures[-1].note == "goal at most 0.00: NO; 2 of 3 cases right"
    assert "FAILED  norms: b: AssertionError: row 3" in capsys.readouterr().out
    assert stage.finish() == 1


def tiny_mixed(**changes: Any) -> MixedPlan:
    return MixedPlan(tiny_plan(), rates=(30.0, 60.0), seconds=0.3, lengths=(4, 20), **changes)


def test_mixed_traffic_on_the_cpu(tmp_path):
    stage = make_stage()
    asyncio.run(MixedBench(stage, HostClock(), tiny_mixed(), tmp_path).run())
    assert (stage.failed, stage.skipped) == ([], [])
    found = figures(stage)
    for rate in (30, 60):
        for figure in (
            "output", "time to first token", "time between tokens", "time between tokens, p99",
            "decode steps", "mixed steps", "mixed steps, p99", "loop lag, p99",
        ):  # fmt: skip
            assert found[f"{rate} requests a second, {figure}"] > 0, figure
    assert [score.name for score, _ in stage.scores.scores] == [
        f"{rate} requests a second, loop lag, p99" for rate in (30, 60)
    ]


class Tracing(HostClock):
    """A kernel and a half for each thing that is traced."""

    def trace(self, work) -> list[DeviceSpan]:
        work()
        spans = [DeviceSpan(i / 1e3, (i + 0.5) / 1e3, f"kernel_{i % 20}") for i in range(40)]
        return [*spans, DeviceSpan(0.04, 0.06, "decode_kernel")]


def test_steps_are_traced_while_they_run(tmp_path):
    stage = make_stage()
    # Enough tokens that a busy machine begins to trace before they are generated.
    shape = replace(TINY, context=4096)
    settings = {"num_threads": 1, "num_blocks": 768, "max_num_seqs": 8}
    plan = ProfilePlan(
        tiny_plan(small=shape, max_len=4000, settings=settings),
        batches=(1, 3),
        truncated_batch=2,
        steps=4,
        prompts=(20, 5),
    )
    asyncio.run(ProfileBench(stage, Tracing(), plan, tmp_path).run())
    assert (stage.failed, stage.skipped) == ([], [])
    found = figures(stage)
    notes = {figure.name: figure.note for figure in stage.report.figures}
    for name in (
        "decode steps of 1 rows",
        "decode steps of 3 rows",
        "decode steps of 2 rows, top_k 20, top_p 0.95",
        "2 rows decode and prompts come",
    ):
        steps, mixed = (int(word) for word in notes[f"{name}, kernels a step"].split()[::2][:2])
        assert steps >= 4
        assert found[f"{name}, kernels a step"] == 41 / steps
        assert (mixed > 0) == ("prompts" in name)
        assert found[f"{name}, busy"] == pytest.approx(2 / 3)
        assert found[f"{name}: decode_kernel"] == pytest.approx(0.02)
        assert notes[f"{name}: decode_kernel"].startswith("1 times, 50.0%, 500.0 µs of nothing")
        assert notes[f"{name}: the others"] == "14 times, 17.5%, 7 kernels"


SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 32}


class PlainAttention(TritonAttention):
    """The backend with its kernels replaced by plain attention."""

    def __init__(self) -> None:
        load = AttentionLoad(1, 1, 0, **SMALL)
        shape = decode.AttentionShape(load.heads, load.kv_heads, load.head_dim, load.head_dim**-0.5)
        super().__init__(shape, torch.bfloat16, CPU, capability=90, num_sms=132)
        self.lengths: list[int] = []

    def __call__(self, q, k, v, cache, plan: TritonPlan):
        self.lengths += plan.seq_lens.tolist()
        return plain_attention(q, cache, plan, self.shape.scale)


def plain_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
    enable_gqa=False, num_splits=None,
):  # fmt: skip
    assert (window_size, enable_gqa, num_splits) == ((-1, 0), True, 1)
    out = []
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(cu_seq_q.tolist()), itertools.pairwise(cu_seq_k.tolist()), strict=True
    ):
        assert (q1 - q0, k1 - k0) == (max_q, max_k)
        scale = query.shape[-1] ** -0.5
        out.append(attend(query[q0:q1], key[k0:k1], value[k0:k1], scale, None, None))
    return torch.cat(out).to(query.dtype)


@pytest.fixture
def varlen(monkeypatch):
    module = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(module, "varlen_attn", plain_varlen)


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


H200 = {"capability": 90, "num_sms": 132}
DEFAULT = Tiles(16, 64, 4, 5)
FAST, BROKEN = Tiles(16, 32, 1, 5), Tiles(16, 128, 4, 5)
DECODE = AttentionLoad(3, 1, 63, **SMALL)
SKEWED = replace(DECODE, longest=600)
PREFILL = AttentionLoad(1, 24, 40, **SMALL)


class Plain(TunedAttention):
    """Notes its launches, and computes them without kernels."""

    launched: list[tuple[Tiles, int]]

    def __call__(self, q: Any, k: Any, v: Any, cache: Any, plan: Any) -> Any:
        if self.decode_tiles == BROKEN:
            raise RuntimeError("out of resource: shared memory\nof 300000 bytes")
        return plain_attention(q, cache, plan, self.shape.scale)


class TableClock(HostClock):
    """The seconds of a launch follow from its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tiles, int]] = []

    def median(self, calls: Any, *, graph: bool = True) -> float:
        cells = dict(zip(calls[0].__code__.co_freevars, calls[0].__closure__, strict=True))
        attention, plan = (cells[name].cell_contents for name in ("attention", "plan"))
        calls[0]()
        self.seen.append((attention.decode_tiles, plan.splits))
        fast = 0.5 if attention.decode_tiles == FAST else 1.0
        return fast / (2 if plan.splits == 2 else 1)


def compiled(jobs: Sequence[CompileJob], gpu: Mapping[str, int], *_: Any) -> Iterator[Compiled]:
    assert gpu == H200
    for job in jobs:
        error = "OutOfResources: shared memory" if job.tiles.rows == 64 else None
        yield Compiled(job, 1.0, 40_000, error)


def test_a_sweep_finds_the_best_and_writes_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "TunedAttention", Plain)
    stage, clock = make_stage(name="tune", out=tmp_path), TableClock()
    plan = TunePlan(
        decodes=(DECODE, SKEWED),
        prefills=(PREFILL,),
        decode_tiles=(DEFAULT, FAST, BROKEN),
        prefill_tiles=(FAST, Tiles(64, 64, 4, 3)),
        splits=(1, 2, 3, 64),
    )
    sweep = Sweep(stage, clock, plan, CPU, cache=10_000, memory=10**9, **H200)
    sweep.run(compiled)
    assert (stage.failed, stage.skipped) == ([], [])
    tables = json.loads((tmp_path / "tune-tables.json").read_text())
    assert tables == json.loads(json.dumps(sweep.tables()))
    loads = dict.fromkeys(entry["load"] for entry in tables["decode tiles"])
    assert list(loads) == ["decode 3 × 64", "decode 3 × 64, one of 600"]
    for table, load, entries in (
        ("decode tiles", DECODE, [(DEFAULT, 1.0), (FAST, 0.5)]),
        ("prefill tiles", PREFILL, [(Tiles(128, 64, 8, 3), 1.0), (FAST, 0.5)]),
    ):
        found = [each for each in tables[table] if each["load"] == load.name]
        assert [(each["tiles"], each["over_default"]) for each in found] == [
            (asdict(tiles), share) for tiles, share in entries
        ]
        assert [each["default"] for each in found] == [True, False]
    assert tables["best"] == {
        table: {"tiles": asdict(FAST), "over_default": 0.5}
        for table in ("decode tiles", "prefill tiles")
    }
    # A split for 64 tokens is one; for 600 it may be three at most, of which two are the fastest.
    found = [each for each in tables["decode splits"] if each["load"] == SKEWED.name]
    assert [each["splits"] for each in found] == [1, 2, 3]
    assert min(found, key=lambda each: each["seconds"])["over_default"] == 0.25
    assert all(each["tiles"] == asdict(FAST) for each in found)
    assert {(one["kernel"], one["tiles"]["keys"], one["reason"]) for one in tables["unusable"]} == {
        ("prefill", 64, "OutOfResources: shared memory"),
        ("decode", 128, "RuntimeError: out of resource: shared memory"),
    }
    values = figures(stage)
    assert values["launches that compile"] == 3 * 2 + 2
    assert values["decode splits, decode 3 × 64, one of 600"] == 0.25


@pytest.mark.slow
def test_pool_compiles_and_reports_failures(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    load = AttentionLoad(2, 1, 1023)
    jobs = [CompileJob(load, Tiles(16, 32, 4, 3)), CompileJob(load, Tiles(24, 32, 4, 3))]
    found = {one.job: one for one in compile_all(jobs, H200, 2, 300)}
    assert found[jobs[0]].error is None
    assert 1000 < found[jobs[0]].shared < 227 * 1024
    # 24 is no power of two.
    assert "CompilationError" in str(found[jobs[1]].error)


def test_every_task_is_a_probe_that_there_is():
    tasks = smoke.tasks()
    assert {task.probe for task in tasks} <= set(smoke_probes.PROBES)
    kernels = [task.options["name"] for task in tasks if task.probe == "kernel"]
    assert sorted(kernels) == sorted(checks_of("cpu", 90))
    assert {"windows", "sinks", "experts"} <= set(kernels)
    models = {task.options["model"] for task in tasks if task.probe == "engine"}
    assert models == set(MODELS)
    settings = {field.name for field in dataclasses.fields(EngineConfig)}
    ways = list(smoke.WAYS.values())
    assert {name for way in ways for name in way.get("settings", {})} <= settings
    for probe in {task.probe for task in tasks if task.bisected}:
        taken = set(inspect.signature(smoke_probes.PROBES[probe]).parameters)
        assert {name for way in ways for name in way} <= taken


STAGED = pytest.param("dense", "staged", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "requests"),
    [
        ("sinks", "plain"),
        STAGED,
        *(
            pytest.param(name, "plain", marks=pytest.mark.slow)
            for name in MODELS
            if name != "sinks"
        ),
    ],
)
def test_an_engine_on_the_cpu_is_right(model, requests):
    """Native ops, one step ahead, against plain torch: the same probe as on a GPU."""
    ((name, value, *_),) = smoke_probes.engine(model, requests, device="cpu")
    assert name == "tokens compared"
    assert value is not None
    assert value > 100


def test_an_engine_in_bfloat16_on_the_cpu_is_right():
    ((_, value, *_),) = smoke_probes.bfloat16(device="cpu")
    assert value is not None
    assert value > 100
    # Weights of 4 bits are further from them than bfloat16.
    with pytest.raises(AssertionError, match=r"log-probability off by|are others"):
        smoke_probes.bfloat16(device="cpu", settings={"quantization": "int4"})
