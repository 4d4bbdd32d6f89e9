"""StatsSession: one connection that watches the engine and may say nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosed

from asyncllm.errors import AsyncLLMError
from asyncllm.serving.response_events import encode
from asyncllm.serving.response_session import Connection

KEEP_ALIVE = 5.0


class StatsSession:
    """Sends a snapshot whenever it differs from the last one, and now and then anyway.

    Args:
        connection: open.
        snapshot: what there is to tell.
        interval: seconds between two looks.
    """

    def __init__(
        self, connection: Connection, snapshot: Callable[[], dict[str, Any]], interval: float
    ) -> None:
        self._connection = connection
        self._snapshot = snapshot
        self._interval = interval

    async def run(self) -> None:
        """Until the connection is closed. A client that sends anything is closed with
        1008."""
        sending = asyncio.create_task(self._send())
        try:
            with contextlib.suppress(ConnectionClosed):
                async for _ in self._connection:
                    await self._connection.close(1008, "this connection is read-only")
        finally:
            sending.cancel()
            await asyncio.wait({sending})

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        last, sent_at = None, 0.0
        while True:
            try:
                event = {"type": "asyncllm.stats", **self._snapshot()}
            except AsyncLLMError:
                await self._connection.close(1001, "the engine is gone")
                return
            if event != last or loop.time() - sent_at > KEEP_ALIVE:
                last, sent_at = event, loop.time()
                try:
                    await self._connection.send(encode(event))
                except ConnectionClosed:
                    return
            await asyncio.sleep(self._interval)
