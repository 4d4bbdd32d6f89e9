"""The mixed stage: steady traffic, whose prompts come while others decode."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine
from benchmarks.common import percentile
from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu.children import ProbeProcess
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.engine import LOOP_LAG, EngineBench, Plan
from benchmarks.gpu.probe import StepRecord, probe_of
from benchmarks.gpu.smoke import Runner
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.traffic import Submit, TrafficTimes, poisson_arrivals, run_traffic

PEERS = {"vllm": "vllm"}
"""Other engines by name, and what each is imported as."""


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """What comes; tests make it small.

    Attributes:
        engine: shape and settings of the engine.
        rates: requests a second, each for ``seconds``.
        lengths: tokens of prompts and of outputs, the least and the most.
    """

    engine: Plan = field(default_factory=Plan)
    rates: tuple[float, ...] = (16.0, 64.0)
    seconds: float = 20.0
    lengths: tuple[int, int] = (64, 512)

    def arrivals(self, rate: float) -> dict[str, Any]:
        """Arguments of ``poisson_arrivals``."""
        shortest, longest = self.lengths
        highest = min(10_000, self.engine.small.vocab - 1)
        sizes = {"shortest": shortest, "longest": longest, "highest_token": highest}
        return {"rate": rate, "seconds": self.seconds, **sizes}


def run(stage: Stage, clock: Clock, plan: MixedPlan | None = None) -> None:
    """Measures on the current CUDA device, or on that of ``plan``, and then each peer that is
    installed, with the same requests."""
    chosen = plan or MixedPlan()
    with tempfile.TemporaryDirectory() as directory:
        bench = MixedBench(stage, clock, chosen, Path(directory))
        asyncio.run(bench.run())
    for name, module in PEERS.items():
        if importlib.util.find_spec(module) is not None:
            processes = ProbeProcess("benchmarks.gpu.peer_probes", stage.deadline.left)
            try:
                measure_peer(stage, clock, chosen, name, processes)
            finally:
                processes.close()


class MixedBench:
    """The engine under traffic of each rate."""

    def __init__(self, stage: Stage, clock: Clock, plan: MixedPlan, directory: Path) -> None:
        self.stage, self.plan = stage, plan
        self._engines = EngineBench(stage, clock, plan.engine, directory)

    async def run(self) -> None:
        await self.stage.attempt_async("mixed traffic", 60, self.measure)

    async def measure(self) -> None:
        plan = self.plan
        async with self._engines.opened(plan.engine.small) as engine:
            # What is allocated, and captured, for the first time.
            warm = {**plan.arrivals(8.0), "seconds": min(1.0, plan.seconds), "seed": 1}
            await run_traffic(submit_to(engine), poisson_arrivals(**warm))
            for rate in plan.rates:
                name = f"{rate:g} requests a second"
                await self.stage.attempt_async(
                    name,
                    2 * plan.seconds,
                    lambda rate=rate, name=name: self.measure_rate(engine, rate, name),
                )

    async def measure_rate(self, engine: AsyncLLMEngine, rate: float, name: str) -> None:
        records = probe_of(engine).records
        records.clear()
        arrivals = poisson_arrivals(**self.plan.arrivals(rate))
        times = await run_traffic(submit_to(engine), arrivals)
        self.stage.report.section(name)
        report_traffic(self.stage, name, times)
        for kind, found in step_times(records).items():
            self.stage.report.add_times(f"{name}, {kind} steps", found, "ms")
        lag = percentile(times.lags, 0.99)
        self.stage.scores.add(f"{name}, loop lag, p99", lag, "ms", LOOP_LAG)


def submit_to(engine: AsyncLLMEngine) -> Submit:
    async def submit(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        async for delta in engine.stream(prompt, max_tokens=max_tokens, ignore_eos=True):
            if delta.token_ids:
                yield len(delta.token_ids)

    return submit


def step_times(records: Sequence[StepRecord]) -> dict[str, list[float]]:
    """Seconds of decode steps and of mixed ones: from the result of the step before, or from its
    own launch, where that came later."""
    found: dict[str, list[float]] = {"decode": [], "mixed": []}
    returned = 0.0
    for record in records:
        kind = "decode" if record.tokens == record.rows else "mixed"
        if record.rows:
            found[kind].append(record.returned_at - max(returned, record.launched_at))
        returned = record.returned_at
    return found


def report_traffic(stage: Stage, name: str, times: TrafficTimes) -> None:
    rate = times.tokens / times.seconds
    stage.report.add(f"{name}, output", rate, "tok/s", f"{len(times.firsts)} requests")
    stage.report.add_times(f"{name}, time to first token", times.firsts, "ms")
    stage.report.add_times(f"{name}, time between tokens", times.between, "ms")
    stage.report.add_times(f"{name}, loop lag", times.lags, "ms")


def measure_peer(stage: Stage, clock: Clock, plan: MixedPlan, name: str, processes: Runner) -> None:
    """A peer's times for the same requests, in a process of its own."""
    clock.release()
    for rate in plan.rates:
        with tempfile.TemporaryDirectory() as directory:
            path = write_checkpoint(Path(directory), plan.engine.small)
            limits = {"max_model_len": plan.engine.max_len, "max_num_seqs": plan.engine.busy_batch}
            options = {"model": str(path), "arrivals": plan.arrivals(rate), **limits}
            label = f"{name}, {rate:g} requests a second"

            def measure(options: dict[str, Any] = options, label: str = label) -> None:
                found = processes.run(name, stage.deadline.left(), options)
                stage.report.section(label)
                report_traffic(stage, label, TrafficTimes(**found))

            stage.attempt(label, 60 + 2 * plan.seconds, measure)
