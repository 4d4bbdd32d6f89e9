"""Exchange: one HTTP request and its answer over ASGI."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import anyio

from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.validation import describe

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = "application/json"
OWNER = "asyncllm.owner"
"""Scope key of the client's identity, a digest of its token."""

LOG_LINE = "asyncllm.log_line"
"""Scope key of the request's LogLine."""


CLOSE_HEADERS = {"Connection": "close"}
"""Headers of an answer that is sent before the body was read to its end."""


def unread_body_headers(scope: Scope) -> Mapping[str, str]:
    """Headers of an answer that leaves the request's body unread.

    A server would go on to parse chunks; the rest of a body of known length costs little.
    """
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    return CLOSE_HEADERS if chunked else {}


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


DISCONNECT_ERRORS = (ClientGoneError, OSError)
"""Errors raised when the client is gone; servers raise OSError."""


class Exchange:
    """Reader of a request's body, and sender of its answer.

    Args:
        max_body: most bytes of the body.
        body_timeout: seconds that a client has to send the body.

    Attributes:
        owner: owner of the responses that it creates, a digest of its token; empty if no token is
            required.
        started: the answer has begun.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, max_body: int, body_timeout: float
    ) -> None:
        self.scope = scope
        self.owner: str = scope.get(OWNER, "")
        self.started = False
        self._has_read = False
        self._receive = receive
        self._send = send
        self._max_body = max_body
        self._body_timeout = body_timeout

    @property
    def path_params(self) -> Mapping[str, str]:
        return self.scope.get("path_params", {})

    def header_values(self, name: bytes) -> list[str]:
        return [v.decode("latin-1") for n, v in self.scope["headers"] if n == name]

    async def body(self) -> bytes:
        """Read the body. Raises ProtocolError if it is too long, too slow or encoded, or
        ClientGoneError."""
        for encoding in self.header_values(b"content-encoding"):
            if encoding.strip().lower() not in ("", "identity"):
                raise ProtocolError(
                    f"Content-Encoding: {describe(encoding)} is not supported here, expected a "
                    "body without encoding",
                    code="unsupported_encoding",
                    status=415,
                    headers={"Accept-Encoding": "identity"},
                )
        for length in self.header_values(b"content-length"):
            if not length.isdecimal() or len(length) > 20 or int(length) > self._max_body:
                raise self._too_large()
        data = bytearray()
        try:
            with anyio.fail_after(self._body_timeout):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    data += message.get("body", b"")
                    if len(data) > self._max_body:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        self._has_read = True
                        return bytes(data)
        except TimeoutError:
            raise ProtocolError(
                f"body: did not come within {self._body_timeout:g} seconds",
                code="request_timeout",
                status=408,
                headers=CLOSE_HEADERS,
            ) from None

    def _too_large(self) -> ProtocolError:
        return ProtocolError(
            f"body: is too long, expected at most {self._max_body} bytes",
            code="request_too_large",
            status=413,
            headers=CLOSE_HEADERS,
        )

    async def gone(self) -> None:
        """Wait until the client closes its connection, the only message after the body."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- the answer ---------------------------------------------------------------------

    async def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the whole answer."""
        await self._start(
            status, content_type, {"content-length": str(len(body)), **(headers or {})}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def respond_json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        await self.respond(status, encode(value).encode(), headers=headers)

    async def refuse(self, error: ProtocolError) -> None:
        """Send an error, unless the answer has begun."""
        if not self.started:
            await self.respond_json(error.body(), error.status, error.headers)

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        # x-accel-buffering: a proxy that buffers would delay tokens.
        await self._start(
            200,
            "text/event-stream; charset=utf-8",
            {"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    async def send_events(self, text: str) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def end_events(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        line = self.scope[LOG_LINE]
        line.status = status
        fields = {"content-type": content_type, "x-content-type-options": "nosniff", **headers}
        if not self._has_read:
            fields.update(unread_body_headers(self.scope))
        encoded = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        encoded.append(line.header)
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


def encode(value: Any) -> str:
    """Serialise to compact JSON."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Shared JSON encoder, because ``json.dumps`` would make one per call."""
