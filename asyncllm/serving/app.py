"""create_app: ASGI application that serves an engine with OpenAI's protocol.

    app = create_app(engine)

It can be mounted in Starlette, FastAPI or Litestar, or run by any ASGI server, as ``asyncllm
serve`` does. Needs the extra ``[server]``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from asyncllm import validation as check
from asyncllm.engine import AsyncLLMEngine
from asyncllm.metrics import EngineMetrics
from asyncllm.serving import responses, server_info
from asyncllm.serving.access import AccessRules
from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.chat_writer import ChatWriter
from asyncllm.serving.choices import handle_completion_request
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.completion_writer import CompletionWriter
from asyncllm.serving.endpoint import Endpoint, Handler
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.frame_pacer import FramePacer
from asyncllm.serving.metrics_cache import MetricsCache
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.request_body import UnsupportedFieldPolicy
from asyncllm.serving.response_session import FIELD_BY_ENGINE_PARAM, ResponseSession
from asyncllm.serving.response_store import ResponseStore
from asyncllm.serving.serving import ServingContext, default_model_names
from asyncllm.serving.sockets import WebSocketConnection, WebSocketSession, run_session
from asyncllm.serving.stats_session import StatsSession, StatsSnapshots
from asyncllm.serving.tokenization import answer_text_request, detokenize, tokenize

Page = Callable[[str], "tuple[str, bytes] | None"]

PUBLIC_PATHS = ("/health", "/health/live", "/health/ready")
"""Paths that need no token, because health checks send none."""


class ServerApp:
    """ASGI application made by ``create_app``."""

    def __init__(self, app: ASGIApp, server_context: ServingContext) -> None:
        self._app = app
        self._server_context = server_context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"].endswith("/"):
            # Litestar adds a slash to the path of a mounted application.
            scope = {**scope, "path": scope["path"].rstrip("/")}
        await self._app(scope, receive, send)

    @property
    def engine(self) -> AsyncLLMEngine:
        return self._server_context.engine

    @property
    def needs_token(self) -> bool:
        """Whether clients have to send a token."""
        return self._server_context.needs_bearer_token

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names for clients."""
        return self._server_context.model_names

    def drain(self) -> None:
        """Answer every new request with 503, ``/health`` too. Requests in flight go on."""
        self._server_context.is_draining = True


def create_app(
    engine: AsyncLLMEngine,
    *,
    token: str | Sequence[str] | None = None,
    origins: Sequence[str] | None = None,
    local: bool = False,
    model_names: Sequence[str] | None = None,
    page: Page | None = None,
    timeout: float | None = None,
    ping_interval: float = 15.0,
    max_body_size: int = 4 << 20,
    body_timeout: float = 30.0,
    max_frame_rate: float = 1000.0,
    max_stored_responses: int = 1024,
    max_stored_size: int = 1 << 26,
    stats_interval: float = 0.1,
    ignore_unsupported: bool = False,
    metrics: EngineMetrics | None = None,
) -> ServerApp:
    """Make an ASGI application that serves ``engine`` with OpenAI's protocol.

    Args:
        engine: a started engine stays the caller's. A new one is started and closed by ASGI
            lifespan events; a mounted application gets no such events, so that its host has to
            start the engine.
        token: accepted bearer tokens; None accepts every client.
        origins: other origins whose pages may send requests, such as "https://app.example"; they
            get CORS headers. "*" is any; None allows only the same origin. Clients other than
            browsers send no origin.
        local: require a loopback address in the Host header; for a server that listens on one.
            Prevents DNS rebinding by web pages.
        model_names: the model's names for clients; None is ``EngineConfig.served_model_name``, else
            the model as given to the engine.
        page: function that serves pages at paths without an endpoint. It gets the decoded path of a
            GET request, without a slash at the end (except "/" itself), and returns a content type
            and a body, or None. Pages need no token, because a browser has no token before it has
            loaded the page.
        timeout: seconds an answer may take.
        ping_interval: seconds of silence after which a stream of events sends a comment.
        max_body_size: maximum number of bytes of a request's body, and of a WebSocket message.
        body_timeout: seconds that a client may take to send its body.
        max_frame_rate: maximum number of events with text per second, over all answers. Beyond it,
            tokens are merged, for at most a tenth of a second.
        max_stored_responses, max_stored_size: maximum number of responses, and of their bytes with
            conversations, that are kept in memory to be continued and read again. The oldest are
            dropped.
        stats_interval: seconds between two snapshots on ``/v1/stats``.
        ignore_unsupported: ignore fields of OpenAI's protocol that this server does not support,
            such as ``truncation="auto"``, and log each once; else they are refused. Unknown fields
            are always refused.
        metrics: this engine's metrics for ``/metrics``; None makes them.

    Raises:
        InvalidRequestError: for an invalid argument.
    """
    if not (page is None or callable(page)):
        raise check.value_error("page", page, "a function of a path, or None")
    allowed_origins = check.strings("origins", origins, optional=True)
    tokens = check.strings("token", (token,) if isinstance(token, str) else token, optional=True)
    if tokens == ():
        raise check.value_error("token", token, "at least one token, or None")
    access_rules = AccessRules(tokens=tokens, origins=allowed_origins, local=local)
    names = check.strings("model_names", model_names, optional=True)
    server_context = ServingContext(
        engine,
        tuple(default_model_names(engine)) if names is None else names,
        check.seconds("timeout", timeout, exclusive_low=True, optional=True),
        check.seconds("ping_interval", ping_interval, exclusive_low=True),
        FramePacer(check.number("max_frame_rate", max_frame_rate, 0, 1e9, exclusive_low=True)),
        ResponseStore(
            check.integer("max_stored_responses", max_stored_responses, 0),
            check.integer("max_stored_size", max_stored_size, 0),
        ),
        check.seconds("stats_interval", stats_interval, exclusive_low=True),
        MetricsCache(EngineMetrics(engine) if metrics is None else metrics),
        needs_bearer_token=tokens is not None,
        unsupported_fields=UnsupportedFieldPolicy(
            check.boolean("ignore_unsupported", ignore_unsupported)
        ),
        max_body_size=check.integer("max_body_size", max_body_size, 1, 2**30),
        body_timeout=check.seconds("body_timeout", body_timeout, exclusive_low=True),
    )
    app = _make_router(server_context, access_rules, page)
    if allowed_origins is not None:
        app = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # pyright: ignore[reportAssignmentType]
    return ServerApp(app, server_context)


def _make_router(
    server_context: ServingContext, access_rules: AccessRules, page: Page | None
) -> ASGIApp:
    chat = partial(handle_completion_request, ChatRequest, ChatWriter)
    completions = partial(handle_completion_request, CompletionRequest, CompletionWriter)
    stored_response_handlers: dict[str, Handler] = {
        "GET": responses.get_response,
        "DELETE": responses.delete_response,
    }
    endpoints: list[tuple[str, dict[str, Handler], dict[str, str]]] = [
        ("/v1/chat/completions", {"POST": chat}, {"prompt": "messages"}),
        ("/v1/completions", {"POST": completions}, {}),
        ("/v1/responses", {"POST": responses.create_response}, FIELD_BY_ENGINE_PARAM),
        ("/v1/responses/{response_id}", stored_response_handlers, FIELD_BY_ENGINE_PARAM),
        ("/tokenize", {"POST": partial(answer_text_request, tokenize)}, {}),
        ("/detokenize", {"POST": partial(answer_text_request, detokenize)}, {}),
        ("/v1/models", {"GET": server_info.list_models}, {}),
        ("/v1/models/{model:path}", {"GET": server_info.get_model}, {}),
        ("/health", {"GET": server_info.show_health}, {}),
        ("/health/ready", {"GET": server_info.show_health}, {}),
        ("/health/live", {"GET": server_info.show_liveness}, {}),
        ("/metrics", {"GET": server_info.show_metrics}, {}),
        ("/openapi.json", {"GET": server_info.show_openapi}, {}),
    ]
    routes: list[BaseRoute] = []
    for path, handlers, field_names in endpoints:
        path_rules = None if path in PUBLIC_PATHS else access_rules
        routes.append(Route(path, Endpoint(server_context, handlers, path_rules, field_names)))
    snapshots = StatsSnapshots(server_context)
    sessions: dict[str, Callable[[WebSocketConnection, str], WebSocketSession]] = {
        "/v1/responses": lambda socket, owner: ResponseSession(socket, server_context, owner),
        "/v1/stats": lambda socket, _: StatsSession(socket, snapshots),
    }
    for path, make_session in sessions.items():
        socket_handlers = {"WEBSOCKET": partial(run_session, make_session)}
        routes.append(
            WebSocketRoute(path, Endpoint(server_context, socket_handlers, access_rules, {}))
        )
    return Router(
        routes,
        redirect_slashes=False,
        default=_make_fallback_app(
            server_context, access_rules, page, {path for path, _, _ in endpoints}
        ),
        lifespan=lambda _: _lifespan(server_context),
    )  # pyright: ignore[reportReturnType]


def _make_fallback_app(
    server_context: ServingContext, access_rules: AccessRules, page: Page | None, paths: set[str]
) -> ASGIApp:
    """Make the application for paths without a route: it serves ``page``'s result, or an error.

    Args:
        paths: paths of the routes.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"].removeprefix(scope.get("root_path", "")), scope.get("method")
        file = page(path or "/") if page is not None and method in ("GET", "HEAD") else None
        if file is not None:
            endpoint = Endpoint(server_context, {"GET": partial(_send_file, file)}, None, {})
        else:
            # The client's base URL lacks /v1, or has it twice.
            intended_paths = {f"/v1{path}", path.removeprefix("/v1")} & paths
            hint = _ERROR_HINT_BY_PATH.get(path, "; /openapi.json has all paths")
            if intended_paths:
                hint = f"; {min(intended_paths)} is"
            refuse = partial(_refuse_path, hint)
            handlers = {"GET": refuse, method or "WEBSOCKET": refuse}
            endpoint = Endpoint(server_context, handlers, access_rules, {})
        await endpoint(scope, receive, send)

    return answer


async def _refuse_path(path_hint: str, server_context: ServingContext, exchange: Exchange) -> None:
    raise ProtocolError(f"there is nothing at this path{path_hint}", code="not_found", status=404)


async def _send_file(
    file: tuple[str, bytes], server_context: ServingContext, exchange: Exchange
) -> None:
    content_type, body = file
    headers = {"cache-control": "no-store"}
    await exchange.respond(200, body, f"{content_type}; charset=utf-8", headers)


_ERROR_HINT_BY_PATH = {
    "/v1/embeddings": "; the engine generates text, and has no embeddings",
    "/v1/messages": "; Anthropic's protocol is not spoken: /v1/chat/completions or /v1/responses",
}
"""Hints in the errors for paths that other inference servers have."""


@asynccontextmanager
async def _lifespan(server_context: ServingContext) -> AsyncIterator[None]:
    if server_context.engine.state == "new":
        async with server_context.engine:
            yield
    else:
        yield
