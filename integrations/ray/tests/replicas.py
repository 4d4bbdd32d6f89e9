"""What the tests ask of replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def stats(handle: Any) -> list[dict[str, Any]]:
    """Statistics of all replicas of a deployment."""
    return await handle.broadcast("stats").results_async()


async def until(is_true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until an async function of no arguments returns something true."""
    end = time.monotonic() + seconds
    while not await is_true():
        assert time.monotonic() < end, "it did not become true in time"
        await asyncio.sleep(0.05)


async def until_idle(handle: Any, seconds: float = 60.0) -> None:
    """Wait until no replica holds a stream, runs a request or has given out a block."""

    async def is_idle() -> bool:
        found = await stats(handle)
        return bool(found) and all(
            one["num_streams"] == one["num_running"] == one["num_waiting"] == 0
            and one["num_free_blocks"] == one["num_blocks"]
            for one in found
        )

    await until(is_idle, seconds)


def replica_of(stream: Any) -> Any:
    """Handle of the actor that holds a stream."""
    return stream._core.replica
