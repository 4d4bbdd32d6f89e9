"""StatsSession, StatsSnapshots: connections that receive the engine's statistics."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field

import anyio

from asyncllm.errors import AsyncLLMError
from asyncllm.serving.client import DISCONNECT_ERRORS
from asyncllm.serving.exchange import encode_json
from asyncllm.serving.response_session import ResponseSession
from asyncllm.serving.serving import ServingContext
from asyncllm.serving.sockets import WebSocketConnection

KEEP_ALIVE_SECONDS = 5.0
"""Maximum number of seconds between two snapshots."""

MAX_LISTED_RESPONSES = 64
"""Maximum number of responses that a snapshot lists."""

MAX_SENT_SNAPSHOTS_PER_SECOND = 500
"""Maximum number of snapshots that all connections send per second. Beyond it, each connection
sends fewer."""


@dataclass(eq=False, repr=False)
class StatsSnapshots:
    """The engine's statistics as JSON, shared by all connections that send them.

    Args:
        server_context: state whose engine and sessions are reported.
    """

    server_context: ServingContext
    _snapshot: str = field(default="", init=False)
    _made_at: float = field(default=0.0, init=False)

    @property
    def pause_seconds(self) -> float:
        """Seconds that a connection waits between two snapshots."""
        num_sessions = len(self.server_context.sessions)
        return max(self.server_context.stats_interval, num_sessions / MAX_SENT_SNAPSHOTS_PER_SECOND)

    def latest(self) -> str:
        """Latest snapshot, which is at most half of ``pause_seconds`` old.

        Raises:
            AsyncLLMError: if the engine is gone.
        """
        now = time.monotonic()
        if now - self._made_at > self.pause_seconds / 2:
            self._snapshot, self._made_at = self._make_snapshot(), now
        return self._snapshot

    def _make_snapshot(self) -> str:
        sessions = self.server_context.sessions
        responses = [
            {"id": turn.events.id, "tokens": turn.events.num_tokens}
            for session in sessions
            if isinstance(session, ResponseSession) and (turn := session.current_turn) is not None
        ]
        return encode_json(
            {
                "type": "asyncllm.stats",
                "stats": asdict(self.server_context.engine.stats()),
                "connections": len(sessions),
                "responses": sorted(responses, key=lambda response: response["id"])[
                    :MAX_LISTED_RESPONSES
                ],
            }
        )


@dataclass(eq=False, repr=False)
class StatsSession:
    """Sends the engine's statistics whenever they change, and at least every KEEP_ALIVE_SECONDS.

    Args:
        connection: an open connection.
        snapshots: the statistics, shared by the connections of a server.
    """

    connection: WebSocketConnection
    snapshots: StatsSnapshots

    async def run(self) -> None:
        """Run until the connection is closed. If the client sends anything, close with 1008."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_snapshots)
            async for message in self.connection:
                del message  # Free it: the connection may stay open for long.
                # Do not wait for the client's close frame: unread messages may come before it.
                tasks.start_soon(self.connection.close, 1008, "this connection is read-only")
            tasks.cancel_scope.cancel()

    async def _send_snapshots(self) -> None:
        last, sent_at = "", 0.0
        with contextlib.suppress(*DISCONNECT_ERRORS):
            while True:
                try:
                    snapshot = self.snapshots.latest()
                except AsyncLLMError:
                    await self.connection.close(1001, "the engine is gone")
                    return
                if snapshot != last or anyio.current_time() - sent_at > KEEP_ALIVE_SECONDS:
                    last, sent_at = snapshot, anyio.current_time()
                    await self.connection.send(snapshot)
                await anyio.sleep(self.snapshots.pause_seconds)
