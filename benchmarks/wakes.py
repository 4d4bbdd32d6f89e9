"""Wakes: what it costs an event loop to wake 256 readers in every step.

python -m benchmarks.engine --only wakes
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import anyio
import anyio.to_thread

from asyncllm.runtime.event_loop import running_backend
from asyncllm.stream import TokenStream
from benchmarks.null_device import null_engine

READERS = 256
STEP_TIME = 0.02


@dataclass
class Wakes:
    """Seconds of CPU time a step; the loop's own two take turns.

    Attributes:
        of_streams: of the loop, each round's mean. The readers' own turns are in it.
        of_futures: of the loop for tasks that do nothing but await bare futures (on trio, its own
            events), all woken in one call from a thread in the same rhythm: the least that this
            can cost.
        of_events: the same with an ``anyio.Event`` for each wait.
        engine_times: of the engine thread, each step's.
    """

    of_streams: list[float] = field(default_factory=list)
    of_futures: list[float] = field(default_factory=list)
    of_events: list[float] = field(default_factory=list)
    engine_times: list[float] = field(default_factory=list)

    @classmethod
    def measured_on(cls, backend: str, options: dict[str, Any], steps: int, rounds: int) -> Wakes:
        """On a loop in the caller's thread, which runs nothing else; arguments as of
        ``anyio.run``."""
        wakes = cls()

        async def main() -> None:
            for _ in range(rounds):
                await wakes._add_streams(steps)
                wakes.of_futures.append(
                    await _time_of(_await_bare, methodcaller("set_result", None), steps)
                )
                wakes.of_events.append(await _time_of(_await_events, methodcaller("set"), steps))

        anyio.run(main, backend=backend, backend_options=options)
        return wakes

    def ratio(self, numerator: str, denominator: str) -> float:
        """The median of the rounds' ratios of two of these."""
        pairs = zip(getattr(self, numerator), getattr(self, denominator), strict=True)
        return statistics.median(a / b for a, b in pairs)

    async def _add_streams(self, steps: int) -> None:
        async with null_engine(max_num_seqs=READERS, step_time=STEP_TIME) as (engine, device):
            streams = [engine.stream([i, 5, 7], ignore_eos=True) for i in range(READERS)]
            async with anyio.create_task_group() as readers:
                for stream in streams:
                    readers.start_soon(_read, stream)
                await anyio.sleep(0.5)
                first, before = engine.stats().num_steps, time.thread_time()
                device.cpu_times.clear()
                await anyio.sleep(STEP_TIME * steps)
                last, after = engine.stats().num_steps, time.thread_time()
                self.engine_times += [b - a for a, b in itertools.pairwise(device.cpu_times)]
                for stream in streams:
                    stream.abort()
        self.of_streams.append((after - before) / (last - first))


async def _await_bare(waiters: list[Any], index: int) -> None:
    make_waiter = running_backend().make_waiter
    while True:
        waiters[index] = waiter = make_waiter()
        await waiter


async def _await_events(waiters: list[Any], index: int) -> None:
    while True:
        waiters[index] = event = anyio.Event()
        await event.wait()


async def _time_of(
    reader: Callable[[list[Any], int], Awaitable[None]], end: Callable[[Any], None], steps: int
) -> float:
    """Seconds of CPU time of the loop, a step of readers that do nothing but wait."""
    post = running_backend().post
    waiters: list[Any] = [None] * READERS

    def wake() -> None:
        for waiter in waiters:
            end(waiter)

    def device() -> None:
        for _ in range(steps):
            time.sleep(STEP_TIME)
            post(wake)

    async with anyio.create_task_group() as readers:
        for index in range(READERS):
            readers.start_soon(reader, waiters, index)
        await anyio.sleep(0.1)
        before = time.thread_time()
        await anyio.to_thread.run_sync(device)
        after = time.thread_time()
        readers.cancel_scope.cancel()
    return (after - before) / steps


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass
