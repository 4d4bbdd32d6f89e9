"""The tune stage of the GPU benchmarks: its sweep on the CPU, and its compiler without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asyncllm.gpu.ops.triton.tuning import Tiles
from benchmarks.gpu import tune
from benchmarks.gpu.paged_inputs import make_inputs, shaped_inputs
from benchmarks.gpu.shapes import AttentionLoad
from benchmarks.gpu.tune import Sweep, TunePlan
from benchmarks.gpu.tune_compile import Compiled, CompileJob, TunedAttention, compile_all
from tests.gpu_stand_ins import HostClock, figures, make_stage
from tests.triton.paged import plain_attention

CPU = torch.device("cpu")
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 32}
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


def test_a_sweep_finds_the_best_and_writes_tables(monkeypatch, tmp_path: Path) -> None:
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


def test_what_is_compiled_is_what_is_launched() -> None:
    """Shapes and strides, for which Triton compiles kernels, are those of real inputs."""
    for load in (DECODE, SKEWED, PREFILL):
        real, shaped = make_inputs(load, 1, CPU), shaped_inputs(load, torch.device("meta"))
        for name in ("queries", "tables", "seq_lens"):
            found, wanted = getattr(shaped, name), getattr(real, name)
            assert (found.shape, found.stride(), found.dtype) == (
                wanted.shape, wanted.stride(), wanted.dtype,
            )  # fmt: skip
        assert shaped.cache.stride()[1:] == real.cache.stride()[1:]
        assert shaped.cache.dtype == real.cache.dtype


@pytest.mark.slow
def test_a_pool_compiles_and_says_what_does_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    load = AttentionLoad(2, 1, 1023)
    jobs = [CompileJob(load, Tiles(16, 32, 4, 3)), CompileJob(load, Tiles(24, 32, 4, 3))]
    found = {one.job: one for one in compile_all(jobs, H200, 2, 300)}
    assert found[jobs[0]].error is None
    assert 1000 < found[jobs[0]].shared < 227 * 1024
    # 24 is no power of two.
    assert "CompilationError" in str(found[jobs[1]].error)
