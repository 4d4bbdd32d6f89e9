"""HttpServer: uvicorn under an application, with bounds on what connections may do.

uvicorn waits for ever for the rest of a header and for a client that does not read, and counts
connections when their request has come. The protocols here end all three.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from asyncllm import validation as check
from asyncllm.serving.gate import App


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds on connections, checked.

    Attributes:
        max_connections: at once; a request over another is answered with 503. Twice as many are
            accepted, so that they can be told so.
        max_header_size: bytes of a request's line and fields.
        max_message_size: bytes of a WebSocket message.
        header_timeout: seconds that a client has to send a header.
        send_timeout: seconds that a client may leave its answer unread.
        keep_alive: seconds that a connection may be idle between two requests.
        ping_interval, ping_timeout: of WebSockets, in seconds; None sends no pings.
    """

    max_connections: int = 1024
    max_header_size: int = 1 << 16
    max_message_size: int = 4 << 20
    header_timeout: float = 10.0
    send_timeout: float = 60.0
    keep_alive: int = 15
    ping_interval: float | None = 20.0
    ping_timeout: float | None = 20.0

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_header_size", "max_message_size", "keep_alive"):
            check.field(self, check.integer, name, 1, 2**30)
        for name in ("header_timeout", "send_timeout"):
            check.field(self, check.seconds, name, above=True)
        for name in ("ping_interval", "ping_timeout"):
            value = check.seconds(name, getattr(self, name), above=True, optional=True)
            object.__setattr__(self, name, value)


class _Timer:
    """At most one call that is due; another one does not put it off."""

    __slots__ = ("_call", "_handle", "_seconds")

    def __init__(self, seconds: float, call: Callable[[], Any]) -> None:
        self._seconds = seconds
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _protocols(limits: ConnectionLimits) -> tuple[type[H11Protocol], type[Any]]:
    """uvicorn's protocols with ``limits``. It makes them by class."""

    class WebSocketProtocol(WebSocketsSansIOProtocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._send_timer = _Timer(limits.send_timeout, lambda: self.transport.abort())

        def pause_writing(self) -> None:
            super().pause_writing()
            self._send_timer.start()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._send_timer.stop()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._send_timer.stop()

    class HttpProtocol(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._header_timer = _Timer(limits.header_timeout, lambda: self.transport.abort())
            self._send_timer = _Timer(limits.send_timeout, lambda: self.transport.abort())

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > 2 * limits.max_connections:
                transport.abort()
            else:
                self._header_timer.start()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.transport.get_protocol() is not self:
                return
            if self.conn.their_state is h11.IDLE:
                self._header_timer.start()
            else:
                self._header_timer.stop()

        def handle_websocket_upgrade(self, event: h11.Request) -> None:
            self._header_timer.stop()
            if len(self.connections) > limits.max_connections:
                self._refuse_upgrade()
            else:
                super().handle_websocket_upgrade(event)

        def _refuse_upgrade(self) -> None:
            text = b"Service Unavailable"
            fields = [
                ("content-type", "text/plain; charset=utf-8"),
                ("content-length", str(len(text))),
                ("retry-after", "1"),
                ("connection", "close"),
            ]
            parts = [h11.Response(status_code=503, headers=fields), h11.Data(data=text)]
            for part in (*parts, h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._send_timer.start()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._send_timer.stop()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._header_timer.stop()
            self._send_timer.stop()

    return HttpProtocol, WebSocketProtocol


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
        http, websocket = _protocols(limits)
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
