"""create_app: OpenAI's protocol over an engine, as an ASGI application.

    app = create_app(engine)

to be mounted in Starlette, FastAPI or Litestar, or run by any ASGI server; ``asyncllm serve`` does.
Needs the extra ``[server]``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

try:
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import BaseRoute, Route, Router, WebSocketRoute

    from asyncllm.metrics import EngineMetrics
    from asyncllm.serving.chat_completions import chat_completions
    from asyncllm.serving.completions import completions
    from asyncllm.serving.response_session import ENGINE_NAMES
    from asyncllm.serving.responses import (
        ResponsesSocket,
        create_response,
        delete_response,
        get_response,
    )
    from asyncllm.serving.server_info import (
        description,
        get_model,
        health,
        list_models,
        live,
        show_metrics,
    )
    from asyncllm.serving.tokenization import detokenize, tokenize
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] == "asyncllm":
        raise
    raise ImportError(
        "asyncllm.serving.create_app needs the extra 'server': pip install 'asyncllm[server]'"
    ) from missing

from asyncllm import validation as check
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import AsyncLLMError
from asyncllm.serving.access import AccessRules
from asyncllm.serving.exchange import ClientGoneError, Exchange, Receive, Scope, Send
from asyncllm.serving.frame_pacer import FramePacer
from asyncllm.serving.gate import App, Gate, refuse
from asyncllm.serving.protocol_error import ProtocolError, from_engine_error
from asyncllm.serving.response_store import ResponseStore
from asyncllm.serving.serving import Serving, default_model_names

logger = logging.getLogger(__name__)

Handler = Callable[[Serving, Exchange], Awaitable[None]]


class Endpoint:
    """An ASGI application of one path.

    Args:
        serving: given to the handlers.
        handlers: by HTTP method.
        names: the engine's parameters that the protocol calls otherwise, for errors.
        limits: of an Exchange.
    """

    def __init__(
        self,
        serving: Serving,
        handlers: Mapping[str, Handler],
        names: dict[str, str],
        limits: Mapping[str, Any],
    ) -> None:
        self._serving = serving
        self._handlers = handlers
        self._names = names
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, **self._limits)
        try:
            await self._handler(scope)(self._serving, exchange)
        except ProtocolError as error:
            await exchange.refuse(error)
        except AsyncLLMError as error:  # of which one is an OSError too
            await exchange.refuse(from_engine_error(error, self._names))
        except (ClientGoneError, OSError):
            return  # servers raise OSError where the client is gone
        except Exception:
            logger.exception("a request to %s failed", scope["path"])
            if exchange.started:
                raise  # which closes the connection: the answer is not whole
            await exchange.refuse(ProtocolError("internal error", code="server_error", status=500))

    def _handler(self, scope: Scope) -> Handler:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method not in self._handlers:
            allowed = ", ".join(self._handlers)
            raise ProtocolError(
                f"method {scope['method'][:20]} is not allowed here, expected {allowed}",
                code="method_not_allowed",
                status=405,
                headers={"Allow": allowed},
            )
        return self._handlers[method]


class ServerApp:
    """An ASGI application, made by ``create_app``."""

    def __init__(self, app: App, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names to clients."""
        return self._serving.model_names

    def drain(self) -> None:
        """From now on every request is answered with 503, and ``/health`` is too; what is in
        flight goes on."""
        self._serving.draining = True


def create_app(
    engine: AsyncLLMEngine,
    *,
    token: str | Sequence[str] | None = None,
    origins: Sequence[str] | None = None,
    local: bool = False,
    model_names: Sequence[str] | None = None,
    timeout: float | None = None,
    ping_interval: float = 15.0,
    max_body_size: int = 4 << 20,
    body_timeout: float = 30.0,
    max_frame_rate: float = 1000.0,
    max_stored_responses: int = 1024,
    max_stored_size: int = 1 << 26,
    metrics: EngineMetrics | None = None,
) -> ServerApp:
    """OpenAI's protocol over ``engine``, as an ASGI application.

    Args:
        engine: borrowed if it is started. One that is new is started and closed with the
            application, by a server that tells it of its lifespan; a mounted application is not
            told, and its host starts the engine.
        token: bearer tokens, one of which clients have to send; None asks for none.
        origins: pages of other origins that may ask, as "https://app.example", and are sent CORS
            headers; "*" is any. None lets no page ask but those of the same origin. Programs send
            no origin.
        local: the Host header has to name a loopback address, as is right for a server that
            listens on one: no page reaches it then under a name that it made resolve to here.
        model_names: the model's names to clients; None is ``EngineConfig.served_model_name``, else
            the model as the engine was asked for it.
        timeout: seconds an answer may take.
        ping_interval: seconds of silence, at most, before a stream of events has a comment.
        max_body_size: bytes of a request, and of a WebSocket message.
        body_timeout: seconds that a client has to send it.
        max_frame_rate: events with text a second, of all answers together; where there would be
            more of them, tokens are merged, for a tenth of a second at most.
        max_stored_responses, max_stored_size: responses that can be continued and read again, and
            characters of them and their conversations; the oldest are dropped. They are in memory.
        metrics: of this engine, to be shown at ``/metrics``; None makes them.

    Raises:
        InvalidRequestError: for an argument that makes no sense.
    """
    pages = check.strings("origins", origins, optional=True)
    rules = AccessRules(token=_tokens(token), origins=pages, local=local)
    names = check.strings("model_names", model_names, optional=True)
    serving = Serving(
        engine,
        tuple(default_model_names(engine)) if names is None else names,
        check.seconds("timeout", timeout, above=True, optional=True),
        check.seconds("ping_interval", ping_interval, above=True),
        FramePacer(check.number("max_frame_rate", max_frame_rate, 0, 1e9, above=True)),
        ResponseStore(
            check.integer("max_stored_responses", max_stored_responses, 0),
            check.integer("max_stored_size", max_stored_size, 0),
        ),
        EngineMetrics(engine) if metrics is None else metrics,
        needs_token=token is not None,
    )
    limits = {
        "max_body": check.integer("max_body_size", max_body_size, 1, 2**30),
        "body_timeout": check.seconds("body_timeout", body_timeout, above=True),
    }
    app: App = Gate(_router(serving, limits), rules, serving)
    if pages is not None:
        app = CORSMiddleware(
            app,
            allow_origins=pages,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # pyright: ignore[reportAssignmentType]
    return ServerApp(app, serving)


def _router(serving: Serving, limits: Mapping[str, Any]) -> App:
    chat = {"prompt": "messages"}
    table: list[tuple[str, dict[str, Handler], dict[str, str]]] = [
        ("/v1/chat/completions", {"POST": chat_completions}, chat),
        ("/v1/completions", {"POST": completions}, {}),
        ("/v1/responses", {"POST": create_response}, ENGINE_NAMES),
        (
            "/v1/responses/{response_id}",
            {"GET": get_response, "DELETE": delete_response},
            ENGINE_NAMES,
        ),
        ("/tokenize", {"POST": tokenize}, {}),
        ("/detokenize", {"POST": detokenize}, {}),
        ("/v1/models", {"GET": list_models}, {}),
        ("/v1/models/{model:path}", {"GET": get_model}, {}),
        ("/health", {"GET": health}, {}),
        ("/health/ready", {"GET": health}, {}),
        ("/health/live", {"GET": live}, {}),
        ("/metrics", {"GET": show_metrics}, {}),
        ("/openapi.json", {"GET": description}, {}),
    ]
    routes: list[BaseRoute] = [
        Route(path, Endpoint(serving, handlers, names, limits)) for path, handlers, names in table
    ]
    return Router(
        [*routes, WebSocketRoute("/v1/responses", ResponsesSocket(serving))],
        redirect_slashes=False,
        default=_Nowhere(serving, limits),
        lifespan=lambda _: _lifespan(serving),
    )  # pyright: ignore[reportReturnType]


class _Nowhere(Endpoint):
    """Every path that there is not."""

    def __init__(self, serving: Serving, limits: Mapping[str, Any]) -> None:
        super().__init__(serving, {}, {}, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse(_NOT_FOUND, scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _handler(self, scope: Scope) -> Handler:
        raise _NOT_FOUND


_NOT_FOUND = ProtocolError("there is nothing at this path", code="not_found", status=404)


@asynccontextmanager
async def _lifespan(serving: Serving) -> AsyncIterator[None]:
    engine = serving.engine
    owned = engine.state == "new"
    if owned:
        await engine.start()
    try:
        yield
    finally:
        if owned:
            await engine.aclose()


def _tokens(token: str | Sequence[str] | None) -> str | Sequence[str] | None:
    if token is None or isinstance(token, str):
        return check.string("token", token, optional=True)
    found = check.strings("token", token, optional=True)
    if not found:
        raise check.invalid("token", token, "at least one token, or None")
    return found
