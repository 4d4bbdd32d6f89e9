"""StatsSession: a connection that receives the engine's statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
from websockets.exceptions import ConnectionClosed

from asyncllm.errors import AsyncLLMError
from asyncllm.serving.exchange import encode
from asyncllm.serving.response_session import Connection

KEEP_ALIVE = 5.0


@dataclass(eq=False, repr=False)
class StatsSession:
    """Sends a snapshot when it differs from the last one, and sometimes anyway.

    Args:
        connection: an open connection.
        snapshot: function that returns the fields of an event.
        interval: seconds between two snapshots.
    """

    connection: Connection
    snapshot: Callable[[], dict[str, Any]]
    interval: float

    async def run(self) -> None:
        """Run until the connection is closed. A client that sends anything is closed with 1008."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send)
            with contextlib.suppress(ConnectionClosed):
                closing = False
                async for _ in self.connection:
                    if not closing:  # not awaited: the close frame follows unread messages
                        tasks.start_soon(
                            self.connection.close, 1008, "this connection is read-only"
                        )
                        closing = True
            tasks.cancel_scope.cancel()

    async def _send(self) -> None:
        last, sent_at = None, 0.0
        with contextlib.suppress(ConnectionClosed):
            while True:
                try:
                    event = {"type": "asyncllm.stats", **self.snapshot()}
                except AsyncLLMError:
                    await self.connection.close(1001, "the engine is gone")
                    return
                if event != last or anyio.current_time() - sent_at > KEEP_ALIVE:
                    last, sent_at = event, anyio.current_time()
                    await self.connection.send(encode(event))
                await anyio.sleep(self.interval)
