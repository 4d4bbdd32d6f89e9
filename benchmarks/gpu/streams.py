"""Requests as streams, read to their end, and who watches the GPU meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from asyncllm import AsyncLLMEngine
from asyncllm.stream import TokenStream
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.workload import Workload


def submit(
    engine: AsyncLLMEngine, work: Workload, temperature: float = 1.0, **sampling: Any
) -> list[TokenStream]:
    """A stream per request; ``sampling`` are fields of SamplingParams."""
    return [
        engine.stream(
            prompt, max_tokens=length, ignore_eos=True, temperature=temperature, **sampling
        )
        for prompt, length in zip(work.prompts, work.max_tokens, strict=True)
    ]


async def drain(streams: Sequence[TokenStream]) -> list[float]:
    """Reads every stream to its end, each in a task of its own; returns when each had its
    first token, in seconds of ``time.perf_counter``."""

    async def read(stream: TokenStream) -> float:
        first = 0.0
        async for delta in stream:
            if not first and delta.token_ids:
                first = time.perf_counter()
        return first

    return await asyncio.gather(*(read(stream) for stream in streams))


class UtilizationMeter:
    """Asks the driver every now and then how busy the GPU is, on a thread beside the loop.

    Attributes:
        values: shares of time, 0 to 1.
    """

    def __init__(self, clock: Clock) -> None:
        self.values: list[float] = []
        self._clock = clock

    async def run(self) -> None:
        """Until it is cancelled, or the driver has no answer."""
        while True:
            # The figure covers up to a second before it.
            await asyncio.sleep(1.0 if not self.values else 0.25)
            value = await asyncio.to_thread(self._clock.utilization)
            if value is None:
                return
            self.values.append(value)
