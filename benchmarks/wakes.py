"""Wakes: what it costs an event loop to wake 256 readers in every step."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncllm.stream import TokenStream
from benchmarks.null_device import null_engine

READERS = 256
STEP_TIME = 0.02


@dataclass
class Wakes:
    """Seconds of CPU time a step; the loop's own two take turns.

    Attributes:
        of_streams: of the loop, each round's mean. The readers' own turns are in it.
        of_futures: of the loop for tasks that do nothing but await bare futures, all woken in
            one call from a thread in the same rhythm: the least that this can cost.
        engine_times: of the engine thread, each step's.
    """

    of_streams: list[float] = field(default_factory=list)
    of_futures: list[float] = field(default_factory=list)
    engine_times: list[float] = field(default_factory=list)

    @classmethod
    def measured_on(
        cls, new_loop: Callable[[], asyncio.AbstractEventLoop], steps: int, rounds: int
    ) -> Wakes:
        """On a loop in the caller's thread, which runs nothing else."""
        wakes = cls()

        async def main() -> None:
            for _ in range(rounds):
                await wakes._add_streams(steps)
                await wakes._add_futures(steps)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())
        return wakes

    def ratios(self) -> list[float]:
        """Streams to bare futures, round by round."""
        return [a / b for a, b in zip(self.of_streams, self.of_futures, strict=True)]

    async def _add_streams(self, steps: int) -> None:
        async with null_engine(max_num_seqs=READERS, step_time=STEP_TIME) as (engine, device):
            streams = [engine.stream([i, 5, 7], ignore_eos=True) for i in range(READERS)]
            readers = [asyncio.create_task(_read(stream)) for stream in streams]
            await asyncio.sleep(0.5)
            first, before = engine.stats().num_steps, time.thread_time()
            device.cpu_times.clear()
            await asyncio.sleep(STEP_TIME * steps)
            last, after = engine.stats().num_steps, time.thread_time()
            self.engine_times += [b - a for a, b in itertools.pairwise(device.cpu_times)]
            for stream in streams:
                stream.abort()
            await asyncio.gather(*readers)
        self.of_streams.append((after - before) / (last - first))

    async def _add_futures(self, steps: int) -> None:
        loop = asyncio.get_running_loop()
        waiters: list[asyncio.Future[None]] = [loop.create_future() for _ in range(READERS)]

        async def wait(index: int) -> None:
            while True:
                waiters[index] = waiter = loop.create_future()
                await waiter

        def wake() -> None:
            for waiter in waiters:
                waiter.set_result(None)

        def device() -> None:
            for _ in range(steps):
                time.sleep(STEP_TIME)
                loop.call_soon_threadsafe(wake)

        readers = [asyncio.create_task(wait(index)) for index in range(READERS)]
        await asyncio.sleep(0)
        before = time.thread_time()
        await asyncio.to_thread(device)
        self.of_futures.append((time.thread_time() - before) / steps)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass
