"""StatsSession: a connection that receives the engine's statistics."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

import anyio

from asyncllm.errors import AsyncLLMError
from asyncllm.serving.exchange import DISCONNECT_ERRORS, encode_json
from asyncllm.serving.response_session import ResponseSession
from asyncllm.serving.serving import ServingContext
from asyncllm.serving.sockets import WebSocketConnection

KEEP_ALIVE_SECONDS = 5.0
"""Maximum number of seconds between two snapshots."""

MAX_LISTED_RESPONSES = 64
"""Maximum number of responses that a snapshot lists."""


@dataclass(eq=False, repr=False)
class StatsSession:
    """Sender of the engine's statistics whenever they change, and every KEEP_ALIVE_SECONDS seconds.

    Args:
        connection: an open connection.
        server_context: state whose engine and sessions are reported.
    """

    connection: WebSocketConnection
    server_context: ServingContext

    async def run(self) -> None:
        """Run until the connection is closed. A client that sends anything is closed with 1008."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_snapshots)
            async for _ in self.connection:
                # Do not wait for the client's close frame: unread messages may come before it.
                tasks.start_soon(self.connection.close, 1008, "this connection is read-only")
            tasks.cancel_scope.cancel()

    async def _send_snapshots(self) -> None:
        last, sent_at = None, 0.0
        with contextlib.suppress(*DISCONNECT_ERRORS):
            while True:
                try:
                    event = self._make_snapshot()
                except AsyncLLMError:
                    await self.connection.close(1001, "the engine is gone")
                    return
                if event != last or anyio.current_time() - sent_at > KEEP_ALIVE_SECONDS:
                    last, sent_at = event, anyio.current_time()
                    await self.connection.send(encode_json(event))
                await anyio.sleep(self.server_context.stats_interval)

    def _make_snapshot(self) -> dict[str, Any]:
        sessions = self.server_context.sessions
        responses = [
            {"id": turn.events.id, "tokens": turn.events.num_tokens}
            for session in sessions
            if isinstance(session, ResponseSession) and (turn := session.current_turn) is not None
        ]
        return {
            "type": "asyncllm.stats",
            "stats": asdict(self.server_context.engine.stats()),
            "connections": len(sessions),
            "responses": sorted(responses, key=lambda response: response["id"])[
                :MAX_LISTED_RESPONSES
            ],
        }
