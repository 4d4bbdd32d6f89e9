"""serve: the engine behind a WebSocket that speaks OpenAI's Responses protocol.

    async with AsyncLLMEngine() as engine:
        async with serve(engine, port=8000) as server:
            await server.serve_forever()

Then ``openai.AsyncOpenAI(base_url="http://127.0.0.1:8000/v1").responses.connect()`` talks to
it. Needs the extra ``[server]``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Generator, Sequence
from http import HTTPStatus
from typing import Any, Self

try:
    import websockets.asyncio.server as ws
    from websockets.datastructures import Headers
    from websockets.exceptions import ConnectionClosed
    from websockets.frames import CloseCode, Frame, Opcode
    from websockets.http11 import Request, Response

    from asyncllm.serving.connections import MAX_FRAGMENTS
except ImportError as missing:
    raise ImportError(
        "asyncllm.serving.websocket needs the extra 'server': pip install 'asyncllm[server]'"
    ) from missing

from asyncllm import validation as check
from asyncllm.engine import AsyncLLMEngine
from asyncllm.serving.access import PROTOCOL, AccessRules, is_loopback
from asyncllm.serving.exchange import encode
from asyncllm.serving.frame_pacer import FramePacer
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.response_session import ResponseSession
from asyncllm.serving.response_store import ResponseStore
from asyncllm.serving.serving import Serving, default_model_names
from asyncllm.serving.stats_session import StatsSession

logger = logging.getLogger(__name__)

RESPONSES_PATH = "/v1/responses"
STATS_PATH = "/v1/stats"
MAX_REFUSING = 64
"""Connections beyond the limit that are told so; further ones get an HTTP status."""

MAX_STORED = 1024
MAX_STORED_SIZE = 1 << 26
"""Responses that can be continued, of all connections, and their characters."""

Page = Callable[[str], "tuple[str, bytes] | None"]


def serve(
    engine: AsyncLLMEngine,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    token: str | None = None,
    origins: Sequence[str] | None = None,
    model_name: str | None = None,
    page: Page | None = None,
    max_connections: int = 256,
    max_message_size: int = 1 << 20,
    timeout: float | None = None,
    ping_interval: float | None = 20.0,
    ping_timeout: float | None = 20.0,
    close_timeout: float = 5.0,
    stats_interval: float = 0.1,
    max_frame_rate: float = 1000.0,
    ssl: Any = None,
) -> WebSocketServer:
    """A server for a started engine; it begins to listen in ``async with`` or ``await``.

    ``/v1/responses`` speaks OpenAI's Responses WebSocket mode; ``/v1/stats`` sends what the
    engine is doing, and reads nothing.

    Args:
        engine: started; it is not closed with the server.
        host, port: where to listen; port 0 takes a free one. Bound to anything but a
            loopback address without a token, the server logs a warning.
        token: bearer token that clients must send in ``Authorization``; None asks for none.
        origins: pages that may connect, as "https://app.example"; None is those that this
            server serves itself, "*" is any. Programs send no origin and may connect.
        model_name: the model's name to clients; None is ``EngineConfig.served_model_name``, else
            the model as the engine was asked for it.
        page: called with the path of every other GET request; returns a content type and a
            body, or None for 404.
        max_connections: at once; more are closed with 1013.
        max_message_size: bytes; a longer message closes its connection with 1009.
        timeout: seconds a response may take.
        ping_interval, ping_timeout: seconds; None sends no pings.
        close_timeout: seconds that a client has to answer a close.
        stats_interval: seconds between two looks at the statistics.
        max_frame_rate: frames of text a second, of all connections together. A frame costs
            about as much time as the loop has for a token of a large batch; where there
            would be more of them, tokens are merged, for a tenth of a second at most.
        ssl: an ``ssl.SSLContext``, or None.

    Raises:
        InvalidRequestError: for an argument that makes no sense.
    """
    host = check.string("host", host, empty=True)
    rules = AccessRules(
        token=check.string("token", token, optional=True),
        origins=check.strings("origins", origins, optional=True),
        local=is_loopback(host),
    )
    options = _options(max_message_size, ping_interval, ping_timeout, close_timeout)
    check.string("model_name", model_name, optional=True)
    serving = Serving(
        engine,
        tuple(default_model_names(engine)) if model_name is None else (model_name,),
        check.seconds("timeout", timeout, above=True, optional=True),
        math.inf,  # the connection has pings of its own
        FramePacer(check.number("max_frame_rate", max_frame_rate, 0, 1e9, above=True)),
        ResponseStore(MAX_STORED, MAX_STORED_SIZE),
    )
    return WebSocketServer(
        serving,
        host,
        check.integer("port", port, 0, 65535),
        rules,
        page,
        check.integer("max_connections", max_connections, 1),
        check.seconds("stats_interval", stats_interval, above=True),
        options | {"ssl": ssl},
    )


def _options(
    max_message_size: int,
    ping_interval: float | None,
    ping_timeout: float | None,
    close_timeout: float,
) -> dict[str, Any]:
    """Those of each connection, in the words of websockets."""
    return {
        "max_size": check.integer("max_message_size", max_message_size, 1, 2**30),
        "ping_interval": check.seconds("ping_interval", ping_interval, above=True, optional=True),
        "ping_timeout": check.seconds("ping_timeout", ping_timeout, above=True, optional=True),
        "close_timeout": check.seconds("close_timeout", close_timeout),
    }


@dataclasses.dataclass(eq=False, repr=False)
class WebSocketServer:
    """Made by ``serve``. ``async with`` starts and closes it; so do ``await`` and
    ``aclose``."""

    _serving: Serving
    host: str
    _port: int
    _rules: AccessRules
    _page: Page | None
    _max_connections: int
    _stats_interval: float
    _options: dict[str, Any]
    _server: ws.Server | None = None
    _sessions: set[ResponseSession | StatsSession] = dataclasses.field(default_factory=set)
    _num_refusing: int = 0

    # --- lifecycle ----------------------------------------------------------------------

    async def start(self) -> Self:
        """Begins to listen.

        Raises:
            OSError: if the address is taken, or not this machine's.
        """
        self.engine.stats()  # an engine that is not running is refused here, not to clients
        if self._rules.open_to_all:
            logger.warning(
                "listening on %s WITHOUT A TOKEN: all who reach this address use the model "
                "and read its statistics. Pass token=…, or bind to 127.0.0.1.",
                self.host,
            )
        self._server = await ws.serve(
            self._handle,
            self.host,
            self._port,
            create_connection=_BoundedConnection,
            process_request=self._process_request,
            select_subprotocol=_select_subprotocol,
            # Tokens are small: compressing them costs more time than it saves, and memory.
            compression=None,
            server_header="asyncllm",
            logger=logger.getChild("connections"),
            **self._options,
        )
        return self

    @property
    def engine(self) -> AsyncLLMEngine:
        return self._serving.engine

    @property
    def model_name(self) -> str:
        """The model's name to clients."""
        return self._serving.model_names[0]

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        if self._server is None:
            return self._port
        return next(iter(self._server.sockets)).getsockname()[1]

    @property
    def num_connections(self) -> int:
        return len(self._sessions)

    async def serve_forever(self) -> None:
        """Until it is cancelled, or the server or its engine is closed.

        Raises:
            EngineDeadError, EngineClosedError: if the engine ended by anything but its
                ``aclose``.
        """
        assert self._server is not None
        server = asyncio.ensure_future(self._server.wait_closed())
        engine = asyncio.ensure_future(self.engine.wait_closed())
        try:
            await asyncio.wait({server, engine}, return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                engine.result()
        finally:
            server.cancel()
            engine.cancel()

    async def aclose(self) -> None:
        """Stops listening and closes every connection with 1001, which aborts what it
        generates. Idempotent."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.start().__await__()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # --- connections --------------------------------------------------------------------

    async def _handle(self, connection: ws.ServerConnection) -> None:
        if len(self._sessions) >= self._max_connections:
            await self._refuse(connection)
            return
        session = self._session(connection)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)

    def _session(self, connection: ws.ServerConnection) -> ResponseSession | StatsSession:
        assert connection.request is not None
        if _path(connection.request) == STATS_PATH:
            return StatsSession(connection, self.snapshot, self._stats_interval)
        headers = connection.request.headers
        owner = self._rules.owner(headers.get_all("Authorization"), _protocols(headers))
        return ResponseSession(connection, self._serving, owner, (ConnectionClosed,))

    async def _refuse(self, connection: ws.ServerConnection) -> None:
        self._num_refusing += 1
        try:
            error = ProtocolError(
                f"there are {self._max_connections} connections already; try again later",
                code="websocket_connection_limit_reached",
                status=503,
            )
            await connection.send(encode(error.event()))
            await connection.close(1013, "too many connections")
        finally:
            self._num_refusing -= 1

    def _process_request(
        self, connection: ws.ServerConnection, request: Request
    ) -> Response | None:
        path = _path(request)
        if path not in (RESPONSES_PATH, STATS_PATH):
            return self._serve_page(path)
        headers = request.headers
        refusal = self._rules.check(
            hosts=headers.get_all("Host"),
            origins=headers.get_all("Origin"),
            authorizations=headers.get_all("Authorization"),
            protocols=_protocols(headers),
        )
        if refusal is not None:
            extra = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
            return _response(refusal.status, "text/plain", refusal.reason.encode(), extra)
        if self._num_refusing >= MAX_REFUSING:
            return _response(503, "text/plain", b"too many connections", {"Retry-After": "1"})
        return None

    def _serve_page(self, path: str) -> Response:
        found = self._page(path) if self._page is not None else None
        if found is None:
            return _response(404, "text/plain", b"not found")
        return _response(200, *found)

    def snapshot(self) -> dict[str, Any]:
        """Fields of an event of ``/v1/stats``: the engine's statistics, and the responses in
        flight."""
        responses = [
            {"id": turn.events.id, "tokens": turn.events.num_tokens}
            for session in self._sessions
            if isinstance(session, ResponseSession) and (turn := session.current) is not None
        ]
        return {
            "stats": dataclasses.asdict(self.engine.stats()),
            "connections": len(self._sessions),
            "responses": sorted(responses, key=lambda one: one["id"])[:64],
        }


class _BoundedConnection(ws.ServerConnection):
    """A connection whose client can make nothing pile up: neither pongs, by pings whose answers it
    does not read, nor fragments, which websockets before 17 collects without an end."""

    _num_fragments = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.paused and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.recv_messages.paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def process_event(self, event: Any) -> None:
        if isinstance(event, Frame) and event.opcode is Opcode.CONT:
            self._num_fragments = 0 if event.fin else self._num_fragments + 1
            if self._num_fragments > MAX_FRAGMENTS:
                self.protocol.fail(CloseCode.MESSAGE_TOO_BIG, f"over {MAX_FRAGMENTS} fragments")
                self.send_data()
                return
        super().process_event(event)


def _path(request: Request) -> str:
    return request.path.partition("?")[0]


def _protocols(headers: Headers) -> list[str]:
    lines = headers.get_all("Sec-WebSocket-Protocol")
    return [name.strip() for line in lines for name in line.split(",")]


def _select_subprotocol(connection: ws.ServerConnection, offered: Sequence[str]) -> Any:
    return PROTOCOL if PROTOCOL in offered else None


def _response(
    status: int, content_type: str, body: bytes, extra: dict[str, str] | None = None
) -> Response:
    headers = {
        "Content-Type": f"{content_type}; charset=utf-8",
        "Content-Length": str(len(body)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Connection": "close",
        **(extra or {}),
    }
    return Response(status, HTTPStatus(status).phrase, Headers(headers), body)
