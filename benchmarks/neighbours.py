"""An engine beside what else an application's machine does, each figure a ratio inside a round.

    python -m benchmarks.neighbours [--shape 0.6b] [--rounds 5] [--dtype bfloat16]

Workload A is one stream, B sixteen at once, as in ``benchmarks.peers`` and on its checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine
from benchmarks import peer_checkpoint
from benchmarks.common import LagMeter, Report, percentile
from benchmarks.peers import draw_prompts


def spin() -> None:
    while True:
        pass


@asynccontextmanager
async def busy_process() -> AsyncIterator[None]:
    """One process that never waits."""
    process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    process.start()
    await asyncio.sleep(0.5)
    try:
        yield
    finally:
        process.kill()
        process.join()


@asynccontextmanager
async def busy_host() -> AsyncIterator[None]:
    """A task of this loop that computes in Python for 20 ms in every 100."""

    async def block() -> None:
        while True:
            end = time.perf_counter() + 0.02
            while time.perf_counter() < end:
                pass
            await asyncio.sleep(0.08)

    task = asyncio.create_task(block())
    try:
        yield
    finally:
        task.cancel()


class NativeSteps:
    """The wall time in which a recorded step of an engine runs, from the calls of its library: of
    one that was queued from its submission to the end of the wait for it."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        executor: Any = engine._thread and engine._thread.core.executor
        self.functions: Any = executor._runner.model.ops.context.functions
        self.spans: list[tuple[float, float]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        library, submitted = self.functions, {}
        run, submit, wait = library.run, library.submit, library.wait

        def timed_run(*args: Any) -> int:
            began = time.perf_counter()
            status = run(*args)
            self.spans.append((began, time.perf_counter()))
            return status

        def timed_submit(context: Any, job: Any) -> int:
            submitted[id(job)] = time.perf_counter()
            return submit(context, job)

        def timed_wait(context: Any, job: Any) -> int:
            status = wait(context, job)
            self.spans.append((submitted[id(job)], time.perf_counter()))
            return status

        library.run, library.submit, library.wait = timed_run, timed_submit, timed_wait
        try:
            yield
        finally:
            library.run, library.submit, library.wait = run, submit, wait

    def seconds(self) -> float:
        """Of all spans, what two have in common counted once."""
        total = end = 0.0
        for first, last in sorted(self.spans):
            total += max(0.0, last - max(first, end))
            end = max(end, last)
        return total


async def share_without_native(engine: AsyncLLMEngine, load: Workloads) -> float:
    """Of B's wall time, in which no native step runs."""
    steps = NativeSteps(engine)
    began = time.perf_counter()
    with steps.watched():
        await load.batch(engine)
    return 1 - steps.seconds() / (time.perf_counter() - began)


class Workloads:
    """A and B with prompts of their own each time."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._seed = 0

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        self._seed += 1
        return draw_prompts(self._seed, lengths, self.vocab_size)

    async def alone(self, engine: AsyncLLMEngine) -> float:
        """Seconds between the tokens of A."""
        times = []
        async for _ in engine.stream(
            self.prompts([128])[0], temperature=0.0, max_tokens=64, ignore_eos=True
        ):
            times.append(time.perf_counter())
        return (times[-1] - times[0]) / 63

    async def batch(self, engine: AsyncLLMEngine) -> float:
        """Output tokens a second of B."""
        rng = random.Random(self._seed)
        prompts = self.prompts([rng.randint(64, 256) for _ in range(16)])
        began = time.perf_counter()
        await asyncio.gather(
            *(
                engine.generate(prompt, temperature=0.0, max_tokens=64, ignore_eos=True)
                for prompt in prompts
            )
        )
        return 16 * 64 / (time.perf_counter() - began)


async def lag_of(engine: AsyncLLMEngine | None, load: Workloads) -> float:
    """p99 of the loop's lag in seconds, beside B or an idle engine."""
    async with LagMeter() as meter:
        if engine is None:
            await asyncio.sleep(3.0)
        else:
            await load.batch(engine)
    value = percentile(meter.lags, 0.99)
    assert value is not None
    return value


async def measure(arguments: argparse.Namespace, checkpoint: Path) -> dict[str, list[float]]:
    """The figures of each round, by name."""
    load = Workloads(peer_checkpoint.SHAPES[arguments.shape]["vocab_size"])
    found: dict[str, list[float]] = {}

    def keep(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    def make() -> AsyncLLMEngine:
        return AsyncLLMEngine(checkpoint, dtype=arguments.dtype, device="cpu")

    async with make() as engine:
        await load.batch(engine)
        for _ in range(arguments.rounds):
            alone, batch = await load.alone(engine), await load.batch(engine)
            keep("A, between tokens", alone)
            keep("B", batch)
            keep("B, wall time without a native step", await share_without_native(engine, load))
            async with busy_process():
                keep("A beside a busy process, times as long", await load.alone(engine) / alone)
                keep("B beside a busy process", await load.batch(engine) / batch)
                keep("lag p99, busy process, engine idle", await lag_of(None, load))
                keep("lag p99, busy process, B", await lag_of(engine, load))
            async with busy_host():
                keep("B, host busy 20 ms in 100", await load.batch(engine) / batch)
            keep("lag p99, engine idle", await lag_of(None, load))
            keep("lag p99, B", await lag_of(engine, load))
        async with make() as other:
            await load.batch(other)
            for _ in range(arguments.rounds):
                one = await load.batch(engine)
                began = time.perf_counter()
                await asyncio.gather(load.batch(engine), load.batch(other))
                both = 2 * 16 * 64 / (time.perf_counter() - began)
                keep("two engines, both loaded, to one", both / one)
    return found


def tell(report: Report, found: dict[str, list[float]]) -> None:
    report.section("medians")
    for name, values in found.items():
        unit = "tok/s" if name == "B" else "×"
        if name.startswith(("lag", "A, ")):
            unit = "ms"
        if name.endswith("native step"):
            unit = "%"
        scale = {"ms": 1e3, "%": 100.0}.get(unit, 1.0)
        note = f"{min(values) * scale:.3g} to {max(values) * scale:.3g}"
        report.add(name, statistics.median(values) * (100 if unit == "%" else 1), unit, note)


def main() -> None:
    parser = peer_checkpoint.options(__doc__)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    checkpoint = peer_checkpoint.make(arguments.folder, arguments.shape)
    report = Report(f"Neighbours: Qwen3 of shape {arguments.shape}, {arguments.dtype}")
    found = asyncio.run(measure(arguments, checkpoint))
    tell(report, found)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
