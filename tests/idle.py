"""An engine that has nothing left to do."""

from __future__ import annotations

import asyncio

from asyncllm import AsyncLLMEngine, EngineStats


async def idle(engine: AsyncLLMEngine) -> EngineStats:
    """Returns when the engine holds nothing any more."""
    async with asyncio.timeout(60):
        while True:
            stats = engine.stats()
            if stats.num_running == stats.num_waiting == stats.num_paused == 0:
                assert stats.num_free_blocks == stats.num_blocks
                return stats
            await asyncio.sleep(0.001)
