"""The tune stage: launch shapes and splits of the attention kernels, tried one after the other."""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from asyncllm.gpu.ops.triton.tuning import MIN_SPLIT_TOKENS, Tiles
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.decode import MEMORY_SHARE
from benchmarks.gpu.paged_inputs import (
    PagedInputs,
    decode_calls,
    inputs_bytes,
    make_inputs,
    prefill_calls,
)
from benchmarks.gpu.shapes import AttentionLoad, rotations
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.tune_compile import Compiled, CompileJob, TunedAttention, compile_all

DECODE_TILES = [
    Tiles(16, keys, warps, stages)
    for keys, warps, stages in itertools.product((64, 32, 128), (4, 2, 1), (3, 5))
]
PREFILL_TILES = [
    Tiles(rows, keys, warps, stages)
    for rows, keys, warps, stages in itertools.product((128, 64), (64, 128), (8, 4), (3, 5))
]
SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
PREFILLS = (AttentionLoad(1, 2048, 0), AttentionLoad(4, 256, 3840), AttentionLoad(1, 32, 32_736))

WIDE: dict[str, Any] = {"kv_heads": 4, "head_dim": 512}
"""Gemma 4 31B's full layers."""
WIDE_DECODE_TILES = [
    Tiles(16, keys, warps, stages)
    for keys, warps, stages in itertools.product((32, 64), (4, 8), (1, 2, 3))
]
WIDE_PREFILL_TILES = [
    Tiles(*shape, 8, stages)
    for shape, stages in itertools.product(((64, 32), (64, 16), (32, 64), (32, 32)), (1, 2, 3))
]
COMPILE_SECONDS = 150.0
POINT_SECONDS = 3.0

Compiler = Callable[[Sequence[CompileJob], Mapping[str, int], int, float], Iterator[Compiled]]


def decode_loads() -> list[AttentionLoad]:
    """Short, long and skewed batches: in the last one sequence is much longer than the others."""
    loads = []
    for batch in (128, 8, 72, 1):
        loads += [AttentionLoad(batch, 1, 1023), AttentionLoad(batch, 1, 8191)]
        if batch > 1:
            loads.append(AttentionLoad(batch, 1, 511, longest=32_768))
    return loads


@dataclass(frozen=True, slots=True)
class TunePlan:
    """What is tried for heads of one size; tests make it small.

    Attributes:
        tables: what the file of its tables is called.
    """

    decodes: Sequence[AttentionLoad] = field(default_factory=decode_loads)
    prefills: Sequence[AttentionLoad] = PREFILLS
    decode_tiles: Sequence[Tiles] = tuple(DECODE_TILES)
    prefill_tiles: Sequence[Tiles] = tuple(PREFILL_TILES)
    splits: Sequence[int] = SPLITS
    tables: str = "tables"


def wide_plan() -> TunePlan:
    return TunePlan(
        [AttentionLoad(batch, 1, 8191, **WIDE) for batch in (64, 8, 1)],
        [AttentionLoad(1, 2048, 0, **WIDE), AttentionLoad(1, 32, 32_736, **WIDE)],
        WIDE_DECODE_TILES,
        WIDE_PREFILL_TILES,
        tables="tables-head512",
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A point of a table.

    Attributes:
        load: what it is called.
        splits: programs per decode row and key/value head; 1 for prefills.
        over_default: its time as a share of that of the backend's own choice for the load.
        default: it is that choice.
    """

    load: str
    tiles: Tiles
    splits: int
    seconds: float
    over_default: float
    default: bool = False


def run(stage: Stage, clock: Clock, compiler: Compiler = compile_all) -> None:
    """Sweeps on the current CUDA device."""
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    for plan in (TunePlan(), wide_plan()):
        sweep = Sweep(
            stage,
            clock,
            plan,
            device,
            capability=10 * major + minor,
            num_sms=properties.multi_processor_count,
            cache=properties.L2_cache_size,
            memory=int(properties.total_memory * MEMORY_SHARE),
        )
        sweep.run(compiler)


class Sweep:
    """Launch shapes at the backend's number of splits, then numbers of splits at the best shape.

    Attributes:
        entries: what was measured, by table: "decode tiles", "decode splits", "prefill tiles".
        unusable: launch shapes that do not compile, with the reason.
    """

    def __init__(
        self,
        stage: Stage,
        clock: Clock,
        plan: TunePlan,
        device: torch.device,
        *,
        capability: int,
        num_sms: int,
        cache: int,
        memory: int,
    ) -> None:
        self.stage, self.clock, self.plan, self.device = stage, clock, plan, device
        self.entries: defaultdict[str, list[Entry]] = defaultdict(list)
        self.unusable: dict[tuple[bool, Tiles], str] = {}
        self._gpu: dict[str, Any] = {"capability": capability, "num_sms": num_sms}
        self._cache, self._memory = cache, memory

    def run(self, compiler: Compiler) -> None:
        stage, plan = self.stage, self.plan
        stage.report.section("compiling")
        stage.attempt("compiling", 30, lambda: self.compile(compiler))
        for title, loads, tiles in (
            ("decode tiles", plan.decodes, plan.decode_tiles),
            ("prefill tiles", plan.prefills, plan.prefill_tiles),
        ):
            stage.report.section(title)
            for load in loads:
                seconds = POINT_SECONDS + 0.25 * len(tiles)
                stage.attempt(
                    f"{title}, {load.name}",
                    seconds,
                    lambda title=title, load=load, tiles=tiles: self.sweep_tiles(
                        title, load, tiles
                    ),
                )
        stage.report.section("decode splits")
        for load in plan.decodes:
            name = f"decode splits, {load.name}"
            stage.attempt(name, 2 * POINT_SECONDS, lambda load=load: self.sweep_splits(load))
        self.report_best()

    def compile(self, compiler: Compiler) -> None:
        """All shapes of both kernels, decode with one split and with several."""
        plan, jobs = self.plan, list[CompileJob]()
        for load in plan.decodes[:1]:
            jobs += [CompileJob(load, tiles, n) for tiles in plan.decode_tiles for n in (1, 2)]
        for load in plan.prefills:
            jobs += [CompileJob(load, tiles) for tiles in plan.prefill_tiles]
        workers = max(1, (os.cpu_count() or 1) - 1)
        seconds = min(COMPILE_SECONDS, self.stage.deadline.left() / 2)
        done = 0
        for found in compiler(jobs, self._gpu, workers, seconds):
            done += 1
            if found.error is not None:
                self.unusable[found.job.load.queries > 1, found.job.tiles] = found.error
        note = f"of {len(jobs)} in {workers} processes, {len(self.unusable)} shapes do not"
        self.stage.report.add("launches that compile", float(done), "", note)

    def sweep_tiles(self, title: str, load: AttentionLoad, tiles: Sequence[Tiles]) -> None:
        inputs = self._inputs(load)
        default = self._attention(load)
        own = default.decode_tiles if load.queries == 1 else default.prefill_tiles
        splits = default.num_splits(load.batch, max(load.lengths), None) if load.queries == 1 else 1
        base = self._measure(inputs, own, splits)
        self._add(title, Entry(load.name, own, splits, base, 1.0, True))
        for shape in tiles:
            if shape != own and (load.queries > 1, shape) not in self.unusable:
                self._try(title, inputs, shape, splits, base)

    def sweep_splits(self, load: AttentionLoad) -> None:
        """At the launch shape that is best for the load."""
        title, name, inputs = "decode splits", load.name, self._inputs(load)
        known = [entry for entry in self.entries["decode tiles"] if entry.load == name]
        default = self._attention(load)
        own = default.num_splits(load.batch, max(load.lengths), None)
        best = min(known, key=lambda entry: entry.seconds, default=None)
        tiles = default.decode_tiles if best is None else best.tiles
        base = next((entry.seconds for entry in known if entry.default), None)
        base = self._measure(inputs, default.decode_tiles, own) if base is None else base
        most = -(-max(load.lengths) // MIN_SPLIT_TOKENS)
        for splits in sorted({own, *(count for count in self.plan.splits if count <= most)}):
            self._try(title, inputs, tiles, splits, base, default=splits == own)

    def _try(
        self,
        title: str,
        inputs: PagedInputs,
        tiles: Tiles,
        splits: int,
        base: float,
        *,
        default: bool = False,
    ) -> None:
        """One that cannot be launched is left out: the GPU has less shared memory than it takes."""
        try:
            seconds = self._measure(inputs, tiles, splits)
        except Exception as error:
            if not self.stage.device_works():
                raise
            reason = (str(error).splitlines() or [""])[0][:120]
            self.unusable[inputs.load.queries > 1, tiles] = f"{type(error).__name__}: {reason}"
            return
        self._add(title, Entry(inputs.load.name, tiles, splits, seconds, seconds / base, default))

    def _measure(self, inputs: PagedInputs, tiles: Tiles, splits: int) -> float:
        attention = self._attention(inputs.load, tiles=tiles, fixed_splits=splits)
        if inputs.load.queries == 1:
            return self.clock.median(decode_calls(attention, inputs, max(inputs.load.lengths)))
        return self.clock.median(prefill_calls(attention, inputs))

    def _attention(self, load: AttentionLoad, **choice: Any) -> TunedAttention:
        return TunedAttention(load, self.device, **choice, **self._gpu)

    def _inputs(self, load: AttentionLoad) -> PagedInputs:
        self.clock.release()
        count = rotations(load.kv_bytes, self._cache)
        if inputs_bytes(load, count) > self._memory:
            raise ValueError(f"{inputs_bytes(load, count) / 2**30:.0f} GiB do not fit")
        return make_inputs(load, count, self.device)

    def _add(self, title: str, entry: Entry) -> None:
        self.entries[title].append(entry)
        self.stage.write(self.plan.tables, self.tables())

    def tables(self) -> dict[str, Any]:
        """As JSON: what was measured, what cannot be, and for each kernel the launch shape whose
        times are the smallest share of the default's, by their geometric mean over all loads."""
        tables: dict[str, Any] = {
            title: [asdict(entry) for entry in entries] for title, entries in self.entries.items()
        }
        tables["best"] = {
            title: {"tiles": asdict(tiles), "over_default": share}
            for title in ("decode tiles", "prefill tiles")
            for tiles, share in [self.best(title)]
            if tiles is not None
        }
        tables["unusable"] = [
            {"kernel": "prefill" if prefill else "decode", "tiles": asdict(tiles), "reason": reason}
            for (prefill, tiles), reason in self.unusable.items()
        ]
        return tables

    def best(self, title: str) -> tuple[Any, float]:
        """Among the launch shapes that were measured for every load that any was."""
        entries = self.entries[title]
        loads = {entry.load for entry in entries}
        shares: defaultdict[Tiles, dict[str, float]] = defaultdict(dict)
        for entry in entries:
            shares[entry.tiles][entry.load] = entry.over_default
        means = {
            tiles: math.exp(sum(map(math.log, found.values())) / len(found))
            for tiles, found in shares.items()
            if found.keys() == loads
        }
        chosen = min(means, key=means.__getitem__, default=None)
        return chosen, math.nan if chosen is None else means[chosen]

    def report_best(self) -> None:
        report = self.stage.report
        report.section("the best of each load, as a share of the default's time")
        for title, entries in self.entries.items():
            for load in dict.fromkeys(entry.load for entry in entries):
                found = min(
                    (entry for entry in entries if entry.load == load), key=lambda e: e.seconds
                )
                t = found.tiles
                note = f"{found.splits} splits, " if load.startswith("decode") else ""
                note += f"{t.rows} × {t.keys}, {t.warps} warps, {t.stages} stages"
                report.add(f"{title}, {load}", found.over_default, "×", note)
