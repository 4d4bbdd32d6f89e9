"""serve: an HTTP and WebSocket server on the application's own event loop.

    async with AsyncLLMEngine() as engine:
        async with serve(engine, port=8000) as server:
            await server.serve_forever()

Then ``openai.AsyncOpenAI(base_url="http://127.0.0.1:8000/v1").responses.connect()`` talks to
it. Needs the extra ``[server]``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Sequence
from ssl import SSLContext
from typing import Any, Self

from asyncllm import validation as check
from asyncllm.engine import AsyncLLMEngine
from asyncllm.serving.app import Page, ServerApp, create_app
from asyncllm.serving.http_server import ConnectionLimits, HttpServer
from asyncllm.serving.loopback import is_loopback

logger = logging.getLogger(__name__)


def serve(
    engine: AsyncLLMEngine,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    token: str | Sequence[str] | None = None,
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
    ssl: SSLContext | None = None,
) -> EngineServer:
    """Make a server for a started engine; ``async with`` or ``await`` begins to listen.

    It serves ``create_app(engine)``: ``/v1/responses`` speaks OpenAI's Responses protocol, over
    HTTP and WebSockets; ``/v1/stats`` sends the engine's statistics over a WebSocket.

    Args:
        engine: a started engine; the server does not close it.
        host, port: address to listen on; port 0 takes a free one. Without a token, the server logs
            a warning unless the address is a loopback one.
        token, origins, page, timeout, stats_interval, max_frame_rate: as for ``create_app``.
        model_name: the model's name for clients; None is ``EngineConfig.served_model_name``, else
            the name of ``EngineConfig.model``, or the last part of its path.
        max_connections: maximum number of connections whose requests are served; requests of others
            are answered with 503.
        max_message_size: maximum number of bytes of a WebSocket message and of a request's body. A
            longer message closes its connection with 1009.
        ping_interval: seconds between pings of a WebSocket; None sends no pings.
        ping_timeout: seconds to wait for the answer to a ping; None waits without limit.
        close_timeout: seconds that a client may take to answer a close, and that HTTP answers in
            flight may take to end when the server closes.
        ssl: context for TLS; None serves without TLS.

    Raises:
        InvalidRequestError: for an invalid argument.
    """
    limits = ConnectionLimits(
        max_connections=max_connections,
        max_message_size=max_message_size,
        close_timeout=close_timeout,
        ping_interval=ping_interval,
        ping_timeout=ping_timeout,
    )
    host, name = check.string("host", host), check.string("model_name", model_name, optional=True)
    app = create_app(
        engine,
        token=token,
        origins=origins,
        local=is_loopback(host),
        model_names=None if name is None else (name,),
        page=page,
        timeout=timeout,
        max_body_size=max_message_size,
        max_frame_rate=max_frame_rate,
        stats_interval=stats_interval,
    )
    return EngineServer(app, host, port, limits=limits, drain=close_timeout, ssl=ssl)


class EngineServer(HttpServer):
    """Server made by ``serve``. ``async with`` starts and closes it; or ``await`` starts it, and
    ``aclose`` closes it."""

    def __init__(self, app: ServerApp, host: str, port: int, **options: Any) -> None:
        super().__init__(app, host, port, **options)
        self._app = app

    @property
    def engine(self) -> AsyncLLMEngine:
        return self._app.engine

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self._app.model_names[0]

    async def __aenter__(self) -> Self:
        """Begin to listen. Raises EngineError for an engine that is not running, and OSError if
        the address cannot be bound."""
        self.engine.stats()  # Raise the engine's error here, instead of at each request.
        if not (self._app.needs_token or is_loopback(self.host)):
            logger.warning(
                "listening on %s WITHOUT A TOKEN: all who reach this address use the model "
                "and read its statistics. Pass token=…, or bind to 127.0.0.1.",
                self.host,
            )
        return await super().__aenter__()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def serve_forever(self) -> None:
        """Wait until the server or its engine is closed, or this call is cancelled.

        Raises:
            EngineDeadError, EngineClosedError: if the engine ended by anything but its
                ``aclose``.
        """
        assert self._task is not None
        engine = asyncio.ensure_future(self.engine.wait_closed())
        try:
            await asyncio.wait({self._task, engine}, return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                engine.result()
        finally:
            engine.cancel()
