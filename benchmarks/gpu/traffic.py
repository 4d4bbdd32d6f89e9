"""Traffic: requests that come at random times, and what their readers and the event loop feel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random

from benchmarks.common import LagMeter
from benchmarks.gpu.workload import Workload, mixed_lengths

Submit = Callable[[list[int], int], AsyncIterator[int]]
"""Takes a prompt and a number of tokens to generate, and yields how many came at a time."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests of a Poisson process.

    Attributes:
        times: seconds after the first begins to be waited for, ascending.
    """

    times: list[float]
    work: Workload


def poisson_arrivals(
    rate: float,
    seconds: float,
    *,
    shortest: int = 64,
    longest: int = 512,
    highest_token: int = 10_000,
    seed: int = 0,
) -> Arrivals:
    """As many requests as come in ``seconds`` at ``rate`` a second, one at least."""
    draw, times, now = Random(seed), list[float](), 0.0
    while True:
        now += draw.expovariate(rate)
        if now >= seconds and times:
            break
        times.append(min(now, seconds))
    work = mixed_lengths(
        len(times), shortest=shortest, longest=longest, highest_token=highest_token, seed=seed
    )
    return Arrivals(times, work)


@dataclass(slots=True)
class TrafficTimes:
    """Seconds.

    Attributes:
        firsts: from each submission to the first token.
        between: from one result of a stream to its next.
        lags: of the event loop, every millisecond.
        tokens: that came in all.
        seconds: from the first submission to the last token.
    """

    firsts: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


async def run_traffic(submit: Submit, arrivals: Arrivals) -> TrafficTimes:
    """Submits each request when it is due, and reads it in a task of its own."""
    found, began = TrafficTimes(), time.perf_counter()

    async def read(due: float, prompt: list[int], max_tokens: int) -> None:
        await asyncio.sleep(max(began + due - time.perf_counter(), 0.0))
        before, is_first = time.perf_counter(), True
        async for count in submit(prompt, max_tokens):
            now = time.perf_counter()
            (found.firsts if is_first else found.between).append(now - before)
            before, is_first = now, False
            found.tokens += count

    work = arrivals.work
    async with LagMeter() as meter:
        await asyncio.gather(*map(read, arrivals.times, work.prompts, work.max_tokens))
    found.lags = meter.lags
    found.seconds = time.perf_counter() - began - arrivals.times[0]
    return found
