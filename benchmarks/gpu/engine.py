"""The engine stage: the whole engine on a GPU, through its public interface."""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine
from benchmarks.common import LagMeter, percentile
from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu.clock import Clock, DeviceMemory, covered_share
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.probe import (
    SteadyStep,
    graph_costs,
    probe_of,
    probed_engine,
    steady_steps,
)
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, ModelShape
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.streams import UtilizationMeter, drain, submit
from benchmarks.gpu.workload import Workload, equal_lengths, mixed_lengths

CAPTURE_SECONDS = Goal("at most", 10.0)
CAPTURE_GIB = Goal("at most", 1.0)
HOST_TIME = Goal("at most", 1.2e-3)
LOOP_LAG = Goal("at most", 2e-3)
BUSY = Goal("at least", 0.97)
NO_DIFFERENCE = Goal("at most", 0.0)
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Plan:
    """What the stage measures; tests make it small.

    Attributes:
        device: of the engines.
        small, large: shapes of the two models.
        small_batches, large_batches: rows of the decode steps that are timed, with a goal on
            step time over its floor where there is one.
        prompt: tokens of each of their prompts.
        steps: decode steps of each that are timed.
        busy_batch: rows at which the host is looked at.
        max_len: tokens of the longest sequence of the small model.
        token_budget: tokens of a step at most.
        workload: makes the requests of the throughput run.
        graphs: whether there are graphs to capture.
        settings: further settings of every engine.
    """

    device: str = "cuda"
    small: ModelShape = QWEN3_06B
    large: ModelShape = LLAMA_8B
    small_batches: tuple[tuple[int, Goal | None], ...] = (
        (1, Goal("at most", 2.3)),
        (64, Goal("at most", 1.6)),
        (256, None),
    )
    large_batches: tuple[tuple[int, Goal | None], ...] = (
        (1, Goal("at most", 1.25)),
        (64, Goal("at most", 1.25)),
    )
    prompt: int = 1024
    steps: int = 64
    busy_batch: int = 256
    max_len: int = 2176
    token_budget: int = 8192
    workload: Callable[[], Workload] = mixed_lengths
    graphs: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    def graph_settings(self, sizes: tuple[int, ...] | None = None) -> dict[str, Any]:
        """Captures all batch sizes, or ``sizes``."""
        return {"cudagraph_capture_sizes": sizes} if self.graphs else {}


def run(stage: Stage, clock: Clock, plan: Plan | None = None) -> None:
    """Measures on the current CUDA device, or on that of ``plan``."""
    with tempfile.TemporaryDirectory() as directory:
        bench = EngineBench(stage, clock, plan or Plan(), Path(directory))
        asyncio.run(bench.run())


class EngineBench:
    """Engines on random weights, opened one after another."""

    def __init__(self, stage: Stage, clock: Clock, plan: Plan, directory: Path) -> None:
        self.stage = stage
        self.clock = clock
        self.plan = plan
        self.report = stage.report
        self._directory = directory
        self._busy: float | None = None
        self._before: DeviceMemory | None = None

    async def run(self) -> None:
        stage, plan = self.stage, self.plan
        self._before = self._memory()
        self.report.section("copy bandwidth")
        self.report.add("copy, read and written", self.clock.copy_bandwidth() / 1e12, "TB/s")
        await stage.attempt_async(f"engine, {plan.small.name}", 60, self.measure_small)
        await stage.attempt_async(f"engine, {plan.large.name}", 60, self.measure_large)
        await stage.attempt_async("graphs against eager", 60, self.compare_graphs)
        await stage.attempt_async("without overlap", 40, self.measure_without_overlap)
        await stage.attempt_async("memory", 40, self.measure_memory)

    @asynccontextmanager
    async def opened(self, shape: ModelShape, **settings: Any) -> AsyncIterator[AsyncLLMEngine]:
        """A started engine on random weights of ``shape``, with graphs of all batch sizes
        unless ``settings`` say otherwise."""
        path = write_checkpoint(self._directory / shape.name.replace(" ", "-"), shape)
        chosen = {
            "model": path,
            "device": self.plan.device,
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "max_model_len": self.plan.max_len,
            "max_num_batched_tokens": self.plan.token_budget,
            # Of 80 GB the KV cache takes half of what is left, and a full batch needs 32.
            "gpu_memory_utilization": 0.95,
            "seed": 0,
            **self.plan.graph_settings(),
            **self.plan.settings,
            **settings,
        }
        self.clock.release()
        async with probed_engine(**chosen) as engine:
            yield engine

    # --- the small model ---------------------------------------------------------------

    async def measure_small(self) -> None:
        shape, attempt = self.plan.small, self.stage.attempt_async
        began = time.perf_counter()
        async with self.opened(shape) as engine:
            self.report.section(f"start, {shape.name}")
            self.report.add("start, random weights and capture", time.perf_counter() - began, "s")
            self.report_capture(engine)
            self.report.section(f"decode steps, {shape.name}, {self.plan.prompt} tokens before")
            for batch, goal in self.plan.small_batches:
                await attempt(
                    f"{shape.name}, batch {batch}",
                    20,
                    lambda batch=batch, goal=goal: self.measure_steps(engine, shape, batch, goal),
                )
            await attempt("host", 20, lambda: self.measure_host(engine, shape))
            await attempt("throughput", 60, lambda: self.measure_throughput(engine))
            await attempt("busy, from a trace", 30, lambda: self.measure_busy(engine, shape))

    def report_capture(self, engine: AsyncLLMEngine) -> None:
        """Per graph, and the sums that have goals."""
        found = graph_costs(engine)
        if found is None:
            self.stage.scores.add("capture of all buckets", None, "s", CAPTURE_SECONDS)
            self.stage.scores.add("memory of all graphs", None, "GiB", CAPTURE_GIB)
            return
        buckets, costs = found
        for cost in costs:
            note = f"{cost.num_bytes / 2**20:.1f} MiB"
            self.report.add(f"graph of {cost.bucket} rows, {cost.part}", cost.seconds, "ms", note)
        note = f"{len(costs)} graphs of {len(buckets)} batch sizes"
        seconds = sum(cost.seconds for cost in costs)
        size = sum(cost.num_bytes for cost in costs) / GIB
        self.stage.scores.add("capture of all buckets", seconds, "s", CAPTURE_SECONDS, note)
        self.stage.scores.add("memory of all graphs", size, "GiB", CAPTURE_GIB, note)

    async def measure_steps(
        self,
        engine: AsyncLLMEngine,
        shape: ModelShape,
        batch: int,
        goal: Goal | None,
        label: str = "",
    ) -> float:
        """Time of a decode step over its floor; returns its median in seconds."""
        steps = await self.decode(engine, shape, batch)
        seconds = statistics.median(step.seconds for step in steps)
        context = statistics.mean(step.context for step in steps)
        floor = shape.step_floor(round(context), self.clock.copy_bandwidth())
        name = f"{shape.name}, batch {batch}{label}"
        note = f"floor {floor * 1e3:.2f} ms, {len(steps)} steps"
        self.report.add(f"{name}, step", seconds, "ms", note)
        if goal is None:
            self.report.add(f"{name}, over the floor", seconds / floor, "×")
        else:
            self.stage.scores.add(f"{name}, over the floor", seconds / floor, "×", goal)
        return seconds

    async def decode(
        self, engine: AsyncLLMEngine, shape: ModelShape, batch: int, meter: LagMeter | None = None
    ) -> list[SteadyStep]:
        """Steps in which ``batch`` sequences decode; ``meter`` runs from the first of them on.

        Raises:
            RuntimeError: there was none, because the batch never was whole.
        """
        plan = self.plan
        records = probe_of(engine).records
        records.clear()
        # The first sequences decode while the last are prefilled.
        prefills = -(-batch * plan.prompt // plan.token_budget)
        length = plan.steps + 2 * prefills + 8
        # On a busy machine the first sequence could end before the last is submitted.
        await engine.pause()
        streams = submit(engine, equal_lengths(batch, plan.prompt, length, vocab=shape.vocab))
        await engine.resume()
        readers = asyncio.create_task(drain(streams))
        if meter is not None:
            await self.until_all_decode(engine, batch, readers)
            async with meter:
                await readers
        await readers
        steps = steady_steps(records, batch)[-plan.steps :]
        if not steps:
            raise RuntimeError(f"no decode step had {batch} rows")
        return steps

    async def until_all_decode(
        self, engine: AsyncLLMEngine, batch: int, readers: asyncio.Task[Any]
    ) -> None:
        """Returns when ``batch`` sequences decode and nothing is prefilled, or all have
        ended."""
        records = probe_of(engine).records
        while not readers.done():
            if records and records[-1].rows == records[-1].tokens == batch:
                return
            await asyncio.sleep(0.005)

    async def measure_host(self, engine: AsyncLLMEngine, shape: ModelShape) -> None:
        """What the engine's Python costs a step, and what its host's loop feels, while a full
        batch is streamed."""
        batch = self.plan.busy_batch
        async with LagMeter() as idle:
            await asyncio.sleep(1.0)
        meter = LagMeter()
        steps = await self.decode(engine, shape, batch, meter)
        self.report.section(f"the host, {batch} streams")
        cpu_time = statistics.median(step.cpu_time for step in steps)
        name = "engine thread, CPU time a step"
        self.stage.scores.add(name, cpu_time, "ms", HOST_TIME, f"batch {batch}")
        self.report.add_times("loop lag, engine idle", idle.lags, "ms")
        self.report.add_times(f"loop lag, {batch} streams", meter.lags, "ms")
        lag = percentile(meter.lags, 0.99)
        self.stage.scores.add("loop lag, p99", lag, "ms", LOOP_LAG)

    async def measure_throughput(self, engine: AsyncLLMEngine) -> None:
        work = self.plan.workload()
        meter = UtilizationMeter(self.clock)
        watch = asyncio.create_task(meter.run())
        began = time.perf_counter()
        streams = submit(engine, work, temperature=0.6)
        try:
            firsts = await drain(streams)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        seconds = time.perf_counter() - began
        self.report.section(f"{len(streams)} streams, {work.num_output_tokens} tokens, mixed")
        rate = work.num_output_tokens / seconds
        self.report.add("throughput", rate, "tok/s", f"{seconds:.2f} s")
        waits = [first - began for first in firsts]
        self.report.add_times("time to first token", waits, "ms")
        # The last streams alone cannot fill a GPU.
        values = meter.values[: max(1, len(meter.values) * 3 // 4)]
        self._busy = statistics.mean(values) if values else None
        if self._busy is not None:
            note = f"the driver's figure, {len(values)} times in the first three quarters"
            self.stage.scores.add("GPU busy", self._busy, "", BUSY, note)

    async def measure_busy(self, engine: AsyncLLMEngine, shape: ModelShape) -> None:
        """From a trace: finer than the driver's figure, but tracing costs the engine time. It
        has the goal where the driver says nothing."""
        plan, probe = self.plan, probe_of(engine)
        room = plan.max_len - plan.prompt
        work = equal_lengths(plan.busy_batch, plan.prompt, room, vocab=shape.vocab, seed=2)
        probe.records.clear()
        streams = submit(engine, work)
        readers = asyncio.create_task(drain(streams))
        try:
            await self.until_all_decode(engine, plan.busy_batch, readers)
            traced = await asyncio.to_thread(self.clock.trace, lambda: time.sleep(0.5))
        finally:
            for stream in streams:
                stream.abort()
            await readers
        busy = covered_share(traced)
        name = f"GPU busy, {plan.busy_batch} streams, from a trace"
        if self._busy is None:
            self.stage.scores.add(name, busy, "", BUSY)
        else:
            self.report.add(name, busy, "")

    # --- the others --------------------------------------------------------------------

    async def measure_large(self) -> None:
        shape = self.plan.large
        sizes = tuple(batch for batch, _ in self.plan.large_batches)
        graphs = self.plan.graph_settings(sizes)
        async with self.opened(shape, max_num_seqs=max(sizes), **graphs) as engine:
            self.report.section(f"decode steps, {shape.name}, {self.plan.prompt} tokens before")
            for batch, goal in self.plan.large_batches:
                await self.stage.attempt_async(
                    f"{shape.name}, batch {batch}",
                    20,
                    lambda batch=batch, goal=goal: self.measure_steps(engine, shape, batch, goal),
                )

    async def compare_graphs(self) -> None:
        """The same requests in every batch size, captured and eager, token for token."""
        shape = self.plan.small
        async with self.opened(shape) as engine:
            found = graph_costs(engine)
            buckets = found[0] if found is not None else ()
            captured = [await self.tokens_of(engine, shape, size) for size in buckets]
        eager_settings = {"cuda_graphs": "off", "cudagraph_capture_sizes": None}
        async with self.opened(shape, **eager_settings) as engine:
            eager = [await self.tokens_of(engine, shape, size) for size in buckets]
        self.report.section("graphs against eager steps")
        wrong = {
            size: differing_rows(ours, theirs)
            for size, ours, theirs in zip(buckets, captured, eager, strict=True)
            if ours != theirs
        }
        note = ", ".join(f"{rows} of {size} rows" for size, rows in wrong.items())
        value = float(len(wrong)) if buckets else None
        name = f"batch sizes of {len(buckets)} with other tokens"
        self.stage.scores.add(name, value, "", NO_DIFFERENCE, note)

    async def tokens_of(
        self, engine: AsyncLLMEngine, shape: ModelShape, batch: int
    ) -> list[tuple[int, ...]]:
        """Tokens of ``batch`` requests that begin and end together, half of them sampled, so
        that each decode step has exactly so many rows."""
        work = equal_lengths(batch, 16, 8, vocab=shape.vocab, seed=batch)
        await engine.pause()
        streams = [
            engine.stream(prompt, max_tokens=8, ignore_eos=True, temperature=0.6 * (i % 2), seed=i)
            for i, prompt in enumerate(work.prompts)
        ]
        await engine.resume()
        return [(await stream.result()).token_ids for stream in streams]

    async def measure_without_overlap(self) -> None:
        """A step with and without a step in flight behind it; the ratio is of this run."""
        shape, batches = self.plan.small, [batch for batch, _ in self.plan.small_batches]
        self.report.section("one step ahead, and not")
        times: dict[bool, list[float]] = {}
        graphs = self.plan.graph_settings(tuple(batches))
        for ahead in (True, False):
            async with self.opened(shape, async_scheduling=ahead, **graphs) as engine:
                label = ", ahead" if ahead else ", not ahead"
                times[ahead] = [
                    await self.measure_steps(engine, shape, batch, None, label) for batch in batches
                ]
        for batch, ahead, alone in zip(batches, times[True], times[False], strict=True):
            self.report.add(f"batch {batch}, not ahead over ahead", alone / ahead, "×")

    async def measure_memory(self) -> None:
        """Device memory before an engine and after it, twice: what is left once may be the
        libraries', what is left again is a leak."""
        shape = self.plan.small
        graphs = self.plan.graph_settings((1, 8))
        sizes = {"before this": self._memory()}
        if self._before is not None:
            sizes = {"before any engine": self._before, **sizes}
        for label in ("after one", "after two"):
            async with self.opened(shape, num_blocks=2048, **graphs) as engine:
                await drain(submit(engine, equal_lengths(8, 32, 16, vocab=shape.vocab)))
                sizes["while open"] = self._memory()
            del engine
            sizes[label] = self._memory()
        self.report.section("device memory")
        for label, size in sizes.items():
            note = f"{size.reserved / 2**20:.1f} MiB reserved, {size.used / 2**20:.0f} in use"
            self.report.add(f"allocated {label}", size.allocated / 2**20, "MiB", note)
        left = (sizes["after two"].reserved - sizes["after one"].reserved) / 2**20
        name = "memory left by the second open and close"
        self.stage.scores.add(name, left, "MiB", NO_DIFFERENCE)

    def _memory(self) -> DeviceMemory:
        gc.collect()
        return self.clock.memory()


def differing_rows(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    return sum(a != b for a, b in zip(ours, theirs, strict=True))
