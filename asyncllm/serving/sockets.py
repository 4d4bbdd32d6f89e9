"""WebSocketConnection: an open WebSocket over ASGI, for ResponseSession and StatsSession."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

import anyio
from starlette.types import Receive, Send

from asyncllm.serving.access import WEBSOCKET_SUBPROTOCOL
from asyncllm.serving.client import DISCONNECT_ERRORS, ClientGoneError
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.serving import ServingContext

logger = logging.getLogger(__name__)


UTF8_TEXT_EXTENSION = "asyncllm.utf8_text"
"""ASGI extension of a server that accepts a text message as UTF-8 in ``bytes``. In a ``str``, one
emoji makes every character take four bytes."""

DISCONNECT_EXTENSION = "asyncllm.disconnect"
"""ASGI extension of a server that sets the ``asyncio.Event`` in ``event`` when it loses the
connection. The application sees a ``websocket.disconnect`` only in its next ``receive``."""

RELEASE_EXTENSION = "asyncllm.release"
"""Key of an ASGI extension with a function ``release``. The application calls the function once it
has freed the last message. Without the call, the message counts as memory in use until the next
``receive``."""


class WebSocketConnection:
    """An open WebSocket connection. Sending raises one of DISCONNECT_ERRORS if the client is
    gone.

    Args:
        extensions: the server's ASGI extensions.
    """

    def __init__(self, receive: Receive, send: Send, extensions: Mapping[str, Any]) -> None:
        self._receive = receive
        self._send = send
        self._sends_utf8 = UTF8_TEXT_EXTENSION in extensions
        self._disconnect = extensions.get(DISCONNECT_EXTENSION)
        self._release = extensions.get(RELEASE_EXTENSION)
        self._is_open = True

    def send(self, message: str | bytes) -> Awaitable[None]:
        """Send a text message, as text or as UTF-8."""
        if not self._is_open:
            raise ClientGoneError
        if isinstance(message, bytes) and not self._sends_utf8:
            message = message.decode()
        return self._send({"type": "websocket.send", "text": message})

    async def wait_for_disconnect(self) -> None:
        """Wait until the connection is lost; for ever on a server without DISCONNECT_EXTENSION."""
        if self._disconnect is None:
            await anyio.sleep_forever()
        else:
            await self._disconnect["event"].wait()

    def release_message(self) -> None:
        """Release the memory claimed for the last message, once nothing refers to it. Call it
        before anything is sent in answer, because the client may read slowly."""
        if self._release is not None:
            self._release["release"]()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(*DISCONNECT_ERRORS):
                await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        """Yield messages until either side closes the connection. No message is kept in memory
        by this iterator, neither during its handling nor during the wait for the next one."""
        while (message := await self._receive())["type"] != "websocket.disconnect":
            if message["type"] == "websocket.receive":
                yield _pop_data(message)
            del message
        self._is_open = False


def _pop_data(message: MutableMapping[str, Any]) -> str | bytes:
    """Remove and return the text or the bytes of an ASGI message."""
    text = message.pop("text", None)
    return message.pop("bytes", None) or b"" if text is None else text


class WebSocketSession(Protocol):
    async def run(self) -> None: ...


async def run_session(
    make_session: Callable[[WebSocketConnection, str], WebSocketSession],
    server_context: ServingContext,
    exchange: Exchange,
) -> None:
    """Accept a WebSocket, and run a session on it.

    Args:
        make_session: makes a session from a connection and the owner of its responses.
        server_context: has the set of open sessions.
    """
    offered = exchange.scope.get("subprotocols", ())
    subprotocol = WEBSOCKET_SUBPROTOCOL if WEBSOCKET_SUBPROTOCOL in offered else None
    extensions = exchange.scope.get("extensions") or {}
    connection = WebSocketConnection(*await exchange.accept(subprotocol), extensions)
    session = make_session(connection, exchange.owner)
    server_context.sessions.add(session)
    try:
        await session.run()
        await connection.close()
    except Exception:
        logger.exception("a WebSocket at %s failed", exchange.scope["path"])
        await connection.close(1011, "internal error")
    finally:
        server_context.sessions.discard(session)
