"""The profile stage: what a step's time goes to, kernel by kernel."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine
from benchmarks.gpu.clock import Clock, DeviceSpan, covered_share
from benchmarks.gpu.engine import EngineBench, Plan
from benchmarks.gpu.kernel_table import kernel_table
from benchmarks.gpu.probe import StepRecord, probe_of
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.streams import drain, submit
from benchmarks.gpu.workload import equal_lengths

ROWS_SHOWN = 14
"""Kernels of a table; the others are summed."""

TRUNCATED = {"top_k": 20, "top_p": 0.95}
"""The sampling that Qwen3 asks for."""


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What is traced; tests make it small.

    Attributes:
        engine: shapes and settings of the engines.
        batches: rows of the decode steps.
        truncated_batch: rows of those whose sampling is truncated as well, and of the library's.
        steps: of each trace.
        prompts: tokens of prompts that come while ``truncated_batch`` rows decode.
    """

    engine: Plan = field(default_factory=Plan)
    batches: tuple[int, ...] = (1, 64, 256)
    truncated_batch: int = 64
    steps: int = 20
    prompts: tuple[int, ...] = (256, 64, 32, 16)


def run(stage: Stage, clock: Clock, plan: ProfilePlan | None = None) -> None:
    """Traces on the current CUDA device, or on that of ``plan``."""
    with tempfile.TemporaryDirectory() as directory:
        bench = ProfileBench(stage, clock, plan or ProfilePlan(), Path(directory))
        asyncio.run(bench.run())


class ProfileBench:
    """Engines on random weights of the small shape, traced while they decode."""

    def __init__(self, stage: Stage, clock: Clock, plan: ProfilePlan, directory: Path) -> None:
        self.stage, self.clock, self.plan = stage, clock, plan
        self._engines = EngineBench(stage, clock, plan.engine, directory)

    async def run(self) -> None:
        stage = self.stage
        await stage.attempt_async("decode and mixed steps", 60, self.profile_steps)
        if importlib.util.find_spec("flash_attn_interface") is not None:
            await stage.attempt_async("FlashAttention 3", 60, self.profile_flash_attention)

    async def profile_steps(self) -> None:
        plan, attempt = self.plan, self.stage.attempt_async
        async with self._engines.opened(plan.engine.small, **self._sizes()) as engine:
            # The first trace of a process begins a second late.
            await asyncio.to_thread(self._engines.clock.trace, lambda: None)
            for batch in plan.batches:
                name = f"decode steps of {batch} rows"
                await attempt(name, 15, lambda n=name, b=batch: self.profile(engine, n, b))
            batch = plan.truncated_batch
            name = f"decode steps of {batch} rows, top_k 20, top_p 0.95"
            await attempt(name, 15, lambda: self.profile(engine, name, batch, sampling=TRUNCATED))
            mixed = f"{batch} rows decode and prompts come"
            await attempt(
                mixed, 15, lambda: self.profile(engine, mixed, batch, prompts=plan.prompts)
            )

    async def profile_flash_attention(self) -> None:
        batch = self.plan.truncated_batch
        settings = {"attention_backend": "flash_attn_3", **self._sizes()}
        async with self._engines.opened(self.plan.engine.small, **settings) as engine:
            name = f"decode steps of {batch} rows, FlashAttention 3"
            await self.profile(engine, name, batch)

    def _sizes(self) -> dict[str, Any]:
        """Captures those alone that are traced."""
        sizes = {*self.plan.batches, self.plan.truncated_batch}
        return self.plan.engine.graph_settings(tuple(sorted(sizes)))

    async def profile(
        self,
        engine: AsyncLLMEngine,
        name: str,
        batch: int,
        *,
        sampling: Mapping[str, Any] | None = None,
        prompts: tuple[int, ...] = (),
    ) -> None:
        """Traces ``plan.steps`` steps, once ``batch`` sequences decode; with ``prompts``, from the
        moment when these are submitted."""
        plan, shape = self.plan.engine, self.plan.engine.small
        room = plan.max_len - plan.prompt
        work = equal_lengths(batch, plan.prompt, room, vocab=shape.vocab, seed=3)
        records = probe_of(engine).records
        records.clear()
        streams = submit(engine, work, **(sampling or {}))
        readers = asyncio.create_task(drain(streams))
        try:
            await self._engines.until_all_decode(engine, batch, readers)
            before = len(records)
            tracing = asyncio.create_task(
                asyncio.to_thread(self.clock.trace, lambda: self._wait(records, before))
            )
            for number, length in enumerate(prompts):
                more = equal_lengths(1, length, 2, vocab=shape.vocab, seed=10 + number)
                streams += submit(engine, more)
            spans = await tracing
        finally:
            for stream in streams:
                stream.abort()
            await asyncio.gather(readers, *(stream.aclose() for stream in streams[batch:]))
        self.report(name, spans, records[before:])

    def _wait(self, records: list[StepRecord], before: int) -> None:
        """Until the steps to be traced have come back, or there are no more."""
        deadline = time.monotonic() + 10
        while len(records) < before + self.plan.steps and time.monotonic() < deadline:
            time.sleep(0.001)

    def report(self, name: str, spans: list[DeviceSpan], steps: list[StepRecord]) -> None:
        report, table = self.stage.report, kernel_table(spans)
        report.section(name)
        mixed = sum(step.tokens > step.rows for step in steps)
        note = f"{len(steps)} steps, {mixed} of them mixed"
        report.add(f"{name}, kernels a step", len(spans) / max(len(steps), 1), "", note)
        report.add(f"{name}, busy", covered_share(spans), "")
        for row in table[:ROWS_SHOWN]:
            note = f"{row.count} times, {row.share:.1%}, {row.gap * 1e6:.1f} µs of nothing before"
            report.add(f"{name}: {row.name}", row.mean, "µs", note)
        if rest := table[ROWS_SHOWN:]:
            count, share = sum(row.count for row in rest), sum(row.share for row in rest)
            mean = sum(row.mean * row.count for row in rest) / count
            note = f"{count} times, {share:.1%}, {len(rest)} kernels"
            report.add(f"{name}: the others", mean, "µs", note)
