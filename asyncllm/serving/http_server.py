"""HttpServer: uvicorn under an application, with bounds on what connections may do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Self

import uvicorn

from asyncllm import validation as check
from asyncllm.serving.connections import ConnectionLimits, protocols
from asyncllm.serving.gate import App


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which leaves signals to the process that it runs in."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()


class HttpServer:
    """Serves an application; ``async with`` begins to listen, and closes.

    Args:
        app: an ASGI application. It is not told of a lifespan.
        host, port: where to listen; port 0 takes a free one.
        limits: on connections.
        drain: seconds that answers may take to end when the server closes.
    """

    def __init__(
        self,
        app: App,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        limits: ConnectionLimits | None = None,
        drain: float = 30.0,
    ) -> None:
        limits = limits or ConnectionLimits()
        self._address = check.string("host", host), check.integer("port", port, 0, 65535)
        http, websocket = protocols(limits)
        self._socket: socket.socket | None = None
        self._config = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType]
            http=http,
            ws=websocket,
            ws_max_size=limits.max_message_size,
            ws_ping_interval=limits.ping_interval,
            ws_ping_timeout=limits.ping_timeout,
            # Tokens are small: compressing them costs more time than it saves, and memory.
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            # A connection counts among those that its request finds.
            limit_concurrency=limits.max_connections + 1,
            timeout_keep_alive=limits.keep_alive,
            timeout_graceful_shutdown=drain,  # pyright: ignore[reportArgumentType]
            h11_max_incomplete_event_size=limits.max_header_size,
        )

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        assert self._socket is not None
        return self._socket.getsockname()[1]

    def bind(self) -> None:
        """Takes the address before the server is started, so that nothing else is done in vain.

        Raises:
            OSError: if it is taken, or not this machine's.
        """
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it. asyncio sets it only where a socket's protocol number says TCP,
        # which is 0 here; with Nagle's algorithm a second event waits 40 ms for the first's ACK.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def __aenter__(self) -> Self:
        """Raises OSError, as ``bind``."""
        if self._socket is None:
            self.bind()
        self._server = _Uvicorn(self._config)
        assert self._socket is not None
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        listening = asyncio.ensure_future(self._server.listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            self._task.result()
        return self

    def close_at_once(self) -> None:
        """Lets a close that is under way wait no longer."""
        self._server.force_exit = True

    async def __aexit__(self, *exc_info: object) -> None:
        """Stops to listen, and waits for the answers in flight, ``drain`` seconds at most."""
        self._server.should_exit = True
        await self._task
        if self._socket is not None:
            self._socket.close()
