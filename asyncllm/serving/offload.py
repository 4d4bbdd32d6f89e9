"""submitted: requests whose submission takes long leave the event loop alone meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")

MANY_TOOLS = 8
"""Reading a tool takes 0.1 to 0.4 ms."""


async def submitted(submit: Callable[[], T], num_tools: int) -> T:
    """``submit()``, on a worker thread where there are many tools to be read."""
    if num_tools < MANY_TOOLS:
        return submit()
    return await anyio.to_thread.run_sync(submit)
