"""HttpServer: runs an application on uvicorn, with limits on connections."""

from __future__ import annotations

import asyncio
import socket
from ssl import SSLContext
from typing import Self

import uvicorn
from starlette.types import ASGIApp as App

from asyncllm import validation as check
from asyncllm.serving.connection_limits import ConnectionLimits
from asyncllm.serving.connections import make_protocols


class HttpServer:
    """Server of an application. Entering ``async with`` starts to listen; leaving it closes the
    server.

    Args:
        app: an ASGI application. It gets no lifespan events.
        host, port: address to listen on; port 0 takes a free one.
        limits: limits on connections.
        drain: seconds that answers may take to end when the server closes.
        ssl: context for TLS; None serves without TLS.
    """

    def __init__(
        self,
        app: App,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        limits: ConnectionLimits | None = None,
        drain: float = 30.0,
        ssl: SSLContext | None = None,
    ) -> None:
        limits = limits or ConnectionLimits()
        self.host: str = check.string("host", host)
        self._port = check.integer("port", port, 0, 65535)
        self._ssl = ssl
        if not (ssl is None or isinstance(ssl, SSLContext)):
            raise check.value_error("ssl", ssl, "an ssl.SSLContext, or None")
        http, websocket = make_protocols(limits)
        self._socket: socket.socket | None = None
        self._task: asyncio.Future[None] | None = None
        config = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType]
            http=http,
            ws=websocket,
            ws_max_size=limits.max_message_size,
            ws_ping_interval=limits.ping_interval,
            ws_ping_timeout=limits.ping_timeout,
            # Messages of single tokens are small: compression would cost time and memory.
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=limits.keep_alive,
            timeout_graceful_shutdown=drain,  # pyright: ignore[reportArgumentType]
            h11_max_incomplete_event_size=limits.max_header_size,
            ssl_context_factory=None if ssl is None else lambda config, default: ssl,
        )
        self._server = uvicorn.Server(config)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        assert self._socket is not None
        return self._socket.getsockname()[1]

    @property
    def url(self) -> str:
        """The server's address, such as "http://127.0.0.1:8000"."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self._ssl else ''}://{host}:{self.port}"

    @property
    def num_connections(self) -> int:
        """Number of open connections, busy or idle."""
        return len(self._server.server_state.connections)

    def bind(self) -> None:
        """Bind the address before the server starts, so that a taken one fails early.

        Raises:
            OSError: if the address is taken, or not this machine's.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        address = self.host, self._port
        self._socket = socket.create_server(address, family=family, backlog=2048)
        # Connections inherit the option. asyncio sets it only for sockets whose protocol number is
        # TCP's; sockets of ``socket.create_server`` have the number 0. With Nagle's algorithm a
        # second event would wait 40 ms for the ACK of the first.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def __aenter__(self) -> Self:
        """Begin to listen. Raises OSError as ``bind`` does."""
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        # uvicorn's ``serve`` would install signal handlers, and does not tell when it listens.
        server = self._server
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[self._socket])
        self._task = asyncio.ensure_future(self._run(self._socket))
        return self

    async def _run(self, listening_socket: socket.socket) -> None:
        await self._server.main_loop()
        await self._server.shutdown(sockets=[listening_socket])

    def close_at_once(self) -> None:
        """End the wait of ``aclose`` for answers in flight."""
        self._server.force_exit = True

    async def aclose(self) -> None:
        """Close the server. Idempotent. WebSockets are closed with 1001, which aborts their
        requests; other answers in flight have ``drain`` seconds to end."""
        if self._task is None:
            return
        self._server.should_exit = True
        await self._task
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()
