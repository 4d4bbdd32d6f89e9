"""submitted: requests whose submission takes long leave the event loop alone meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import anyio.to_thread

from asyncllm.stream import TokenStream

MANY_TOOLS = 8
"""Reading a tool takes 0.1 to 0.4 ms."""


async def submitted(submit: Callable[[], TokenStream], num_tools: int) -> TokenStream:
    """``submit()``, on a worker thread where there are many tools to be read."""
    if num_tools < MANY_TOOLS:
        return submit()
    return await anyio.to_thread.run_sync(submit)
