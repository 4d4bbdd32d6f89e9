"""Gate: ASGI middleware for access checks, request ids and the log."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from asyncllm.serving.access import AccessRules, Refusal
from asyncllm.serving.exchange import (
    CLOSE_HEADERS,
    JSON,
    LOG_LINE,
    OWNER,
    Receive,
    Scope,
    Send,
    encode,
    unread_body_headers,
)
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.serving import Serving

logger = logging.getLogger("asyncllm.serving.access")

App = Callable[[Scope, Receive, Send], Awaitable[None]]

_CODES = {400: "invalid_header", 401: "invalid_api_key", 403: "forbidden"}


class Gate:
    """Middleware of an endpoint: checks access, refuses requests while draining, and logs them.

    Args:
        app: the endpoint.
        rules: rules of access; None admits every request, also while draining.
        serving: state of the server, which may be draining.
    """

    def __init__(self, app: App, rules: AccessRules | None, serving: Serving) -> None:
        self._app = app
        self._rules = rules
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = scope[LOG_LINE] = LogLine(scope)
        try:
            _check_framing(scope)
            if self._rules is not None:
                self._check(scope, self._rules)
                self._serving.check_open()
            await self._app(scope, receive, send)
        except ProtocolError as error:
            await refuse(error, scope, receive, send)
        finally:
            line.write()

    def _check(self, scope: Scope, rules: AccessRules) -> None:
        def all_of(name: bytes) -> list[str]:
            return [v.decode("latin-1") for n, v in scope["headers"] if n == name]

        authorizations = all_of(b"authorization")
        protocols = scope.get("subprotocols", ())
        refusal = rules.check(
            hosts=all_of(b"host"),
            origins=all_of(b"origin"),
            authorizations=authorizations,
            protocols=protocols,
        )
        if refusal is not None:
            raise _to_protocol_error(refusal)
        scope[OWNER] = rules.owner(authorizations, protocols)


class LogLine:
    """A request's line in the log. Senders of answers set ``status`` here, so that sends need not
    pass through a wrapper.

    Attributes:
        status: HTTP status of the answer; "-" before there is one.
    """

    __slots__ = ("_began", "_id", "_scope", "status")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._id = f"req_{uuid.uuid4().hex}"
        self._began = time.monotonic()
        self.status: int | str = "-"

    @property
    def header(self) -> tuple[bytes, bytes]:
        """Header with the request's id, for its answer."""
        return b"x-request-id", self._id.encode()

    def write(self) -> None:
        scope = self._scope
        client = scope.get("client")
        logger.info(
            "%s %s %s %s %.3f s %s",
            client[0] if client else "-",
            scope.get("method", "WEBSOCKET"),
            # raw_path is percent-encoded, so no line break can forge a log line.
            scope.get("raw_path", b"-").decode("latin-1")[:200],
            self.status,
            time.monotonic() - self._began,
            self._id,
        )


def _check_framing(scope: Scope) -> None:
    """Refuse a body with two lengths: a proxy in front might end it elsewhere."""
    if {name for name, _ in scope["headers"]} >= {b"content-length", b"transfer-encoding"}:
        raise ProtocolError(
            "header: has Content-Length and Transfer-Encoding, expected one of them",
            code="invalid_header",
            headers=CLOSE_HEADERS,
        )


def _to_protocol_error(refusal: Refusal) -> ProtocolError:
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
    code = _CODES.get(refusal.status, "refused")
    return ProtocolError(refusal.reason, code=code, status=refusal.status, headers=headers)


async def refuse(error: ProtocolError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request, or a WebSocket's handshake, with an error."""
    body = encode(error.body()).encode()
    fields = {"content-type": JSON, "content-length": str(len(body)), **(error.headers or {})}
    fields.update(unread_body_headers(scope))
    headers = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    line = scope[LOG_LINE]
    headers.append(line.header)
    kind = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:100]})
            return
        kind = "websocket.http.response"
    line.status = error.status
    await send({"type": f"{kind}.start", "status": error.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
