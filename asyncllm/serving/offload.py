"""submit_offloaded: runs a slow submission on a worker thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")

MANY_TOOLS = 8
"""Tools from which on submission uses a thread; reading one takes 0.1 to 0.4 ms."""


async def submit_offloaded(submit: Callable[[], T], num_tools: int) -> T:
    """Call ``submit()``, on a worker thread if there are many tools to read."""
    if num_tools < MANY_TOOLS:
        return submit()
    return await anyio.to_thread.run_sync(submit)
