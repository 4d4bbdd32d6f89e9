"""Exchange: one HTTP request, or one WebSocket's handshake, and its answer over ASGI."""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from asyncllm.errors import AsyncLLMError
from asyncllm.serving.byte_budget import RATE_CHECK_SECONDS, ByteClaim
from asyncllm.serving.client import ClientGoneError
from asyncllm.serving.protocol_error import ProtocolError, to_protocol_error
from asyncllm.serving.serving import MIN_LARGE_JSON_BYTES, ServingContext
from asyncllm.stream import TokenStream
from asyncllm.validation import describe

T = TypeVar("T")

logger = logging.getLogger("asyncllm.serving.access")

JSON_CONTENT_TYPE = "application/json"

CLOSE_HEADERS = {"Connection": "close"}
"""Headers of an answer that is sent before the whole request body was read."""


OWNER_KEY = "asyncllm.owner"
"""Key of ``websocket.accept`` with the client's owner. asyncllm's server grants memory for long
messages in turns by owner; other servers ignore the key."""


BACKLOG_EXTENSION = "asyncllm.backlog"
"""Key of an ASGI extension with a function ``is_waiting``. The function returns whether the server
has received bytes from the client that it has not parsed yet: then the client is not slow."""


class Exchange:
    """Reader of a request's body, and sender of the answer.

    Args:
        server_context: the server's settings, such as the maximum size of a body.
        field_by_engine_param: map from engine parameters to the protocol's fields, where the names
            differ; for errors.

    Attributes:
        headers: headers of the request.
        owner: owner of the responses that the client creates, a digest of its token; empty if no
            token is required.
        has_begun_answer: whether the answer has begun.
        is_client_gone: whether the client was seen to close its connection.
    """

    def __init__(
        self,
        server_context: ServingContext,
        scope: Scope,
        receive: Receive,
        send: Send,
        field_by_engine_param: Mapping[str, str],
    ) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.owner = ""
        self.has_begun_answer = self.is_client_gone = False
        self._server_context = server_context
        self._receive = receive
        self._disconnect_lock = anyio.Lock(fast_acquire=True)
        backlog = (scope.get("extensions") or {}).get(BACKLOG_EXTENSION)
        self._is_backlogged = None if backlog is None else backlog["is_waiting"]
        self._send = send
        self.field_by_engine_param = field_by_engine_param
        self._has_read_body = False
        self._claim: ByteClaim | None = None
        self._id = f"req_{uuid.uuid4().hex}"
        self._began_at = time.monotonic()
        self._status: int | str = "-"

    async def read_body(self) -> bytes:
        """Read the body. A long body first waits for memory, which ``release_body`` frees again.

        Raises:
            ProtocolError: if the body is too long, too slow or encoded.
            ClientGoneError: if the client is gone.
        """
        for encoding in self.headers.getlist("content-encoding"):
            if encoding.strip().lower() not in ("", "identity"):
                raise ProtocolError(
                    f"Content-Encoding: {describe(encoding)} is not supported here, expected a "
                    "body without encoding",
                    code="unsupported_encoding",
                    status=415,
                    headers={"Accept-Encoding": "identity"},
                )
        max_size, timeout = self._server_context.max_body_size, self._server_context.body_timeout
        content_length = 0
        for length in self.headers.getlist("content-length"):
            if not length.isdecimal() or len(length) > 20 or int(length) > max_size:
                raise _too_large_error(max_size)
            content_length = int(length)
        data = bytearray()
        try:
            with anyio.fail_after(timeout) as scope:
                while True:
                    is_large = max(content_length, len(data)) >= MIN_LARGE_JSON_BYTES
                    if self._claim is None and (is_large or self._has_read_body):
                        # A small body claims memory only once it is received, so that a client
                        # that sends only a part of its body does not hold up others. A chunked
                        # body has no Content-Length: claim the maximum. The timeout is for the
                        # client, so it stops while the server waits for memory.
                        scope.deadline = math.inf
                        num_claimed_bytes = (
                            len(data) if self._has_read_body else content_length or max_size
                        )
                        self._claim = await self._server_context.claim_body_bytes(
                            num_claimed_bytes, self.owner
                        )
                        scope.deadline = anyio.current_time() + timeout
                    if self._has_read_body:
                        return bytes(data)
                    message = await self._receive_body_part(len(data))
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    data += message.get("body", b"")
                    if len(data) > max_size:
                        raise _too_large_error(max_size)
                    self._has_read_body = not message.get("more_body", False)
                    del message  # Free its copy of the bytes: a small body waits for memory next.
        except TimeoutError:
            raise _too_slow_error(f"did not come within {timeout:g} seconds") from None

    async def process_body(self, handle_body: Callable[[bytes], T]) -> T:
        """Read the body and call ``handle_body`` with it, on the worker thread for a long body.
        Afterwards nothing refers to the body, so that its memory is freed."""
        body = await self.read_body()
        return await self._server_context.run_json_job(lambda: handle_body(body), len(body), self)

    async def _receive_body_part(self, num_received: int) -> Message:
        """Receive the next part of the body.

        Raises:
            ProtocolError: if the body is received too slowly while other requests wait for memory.
        """
        while self._claim is not None:
            is_backlogged = self._is_backlogged is not None and self._is_backlogged()
            if self._claim.is_too_slow(num_received, is_backlogged=is_backlogged):
                raise _too_slow_error(
                    f"less than {self._claim.min_bytes_per_check >> 10} KiB came per "
                    f"{RATE_CHECK_SECONDS:g} seconds, while other requests waited"
                )
            with anyio.move_on_after(self._claim.seconds_until_check):
                return await self._receive()
        return await self._receive()

    def release_body(self, untokenized_streams: Sequence[TokenStream] = ()) -> None:
        """Release the memory claimed for the body, once the prompts of ``untokenized_streams`` are
        tokenised, or their requests have ended."""
        claim, self._claim = self._claim, None
        self._server_context.release_claim(claim, untokenized_streams)

    async def wait_for_disconnect(self) -> None:
        """Wait until the client closes its connection. Call it after the body is read; several
        tasks may wait."""
        # Only one task may receive at a time: a server reports the disconnect to one.
        async with self._disconnect_lock:
            while not self.is_client_gone:
                self.is_client_gone = (await self._receive())["type"] == "http.disconnect"

    # --- the answer ---------------------------------------------------------------------

    async def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = JSON_CONTENT_TYPE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the whole answer.

        Raises:
            ProtocolError: if the answer is long, and other clients' unread answers take the memory.
        """
        fields = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
        claim = self._server_context.claim_answer_bytes(len(body))
        try:
            message_prefix = await self._send_head(status, fields)
            await self._send({"type": f"{message_prefix}.body", "body": body})
        finally:
            claim.release()

    async def respond_json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        await self.respond(status, encode_json(value).encode(), headers=headers)

    async def send_error(self, error: ProtocolError | AsyncLLMError) -> None:
        """Send an error, unless the answer has begun."""
        answer = to_protocol_error(error, self.field_by_engine_param)
        if self.has_begun_answer:
            return
        extensions = self.scope.get("extensions") or ()
        if self.scope["type"] == "websocket" and "websocket.http.response" not in extensions:
            await self._receive()
            reason = str(answer)[:100]
            await self._send({"type": "websocket.close", "code": 1008, "reason": reason})
        else:
            await self.respond_json(answer.body(), answer.status, answer.headers)

    async def accept(self, subprotocol: str | None) -> tuple[Receive, Send]:
        """Open the WebSocket; returns its functions to receive and to send messages."""
        await self._receive()
        self.has_begun_answer, self._status = True, 101
        accept = {"type": "websocket.accept", "subprotocol": subprotocol}
        await self._send({**accept, OWNER_KEY: self.owner})
        return self._receive, self._send

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        await self._send_head(
            200,
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                # A proxy that buffers would delay tokens.
                "x-accel-buffering": "no",
            },
        )

    async def send_events(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_event_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _send_head(self, status: int, headers: Mapping[str, str]) -> str:
        """Send status and headers; returns the prefix of the ASGI message types."""
        self.release_body()  # A client may read its answer slowly: free the memory for others.
        self.has_begun_answer, self._status = True, status
        fields = {"x-content-type-options": "nosniff", "x-request-id": self._id, **headers}
        if not self._has_read_body and "transfer-encoding" in self.headers:
            # Close the connection: else the server would parse all remaining chunks. Skipping the
            # rest of a body of known length costs little.
            fields |= CLOSE_HEADERS
        encoded = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        is_http = self.scope["type"] == "http"
        message_prefix = "http.response" if is_http else "websocket.http.response"
        await self._send({"type": f"{message_prefix}.start", "status": status, "headers": encoded})
        return message_prefix

    def log(self) -> None:
        """Write the request's line in the log. Without an answer the status is "-"."""
        scope = self.scope
        client = scope.get("client")
        logger.info(
            "%s %s %s %s %.3f s %s",
            client[0] if client else "-",
            scope.get("method", "WEBSOCKET"),
            # raw_path is percent-encoded, so no line break can forge a log line.
            scope.get("raw_path", b"-").decode("latin-1")[:200],
            self._status,
            time.monotonic() - self._began_at,
            self._id,
        )


def _too_slow_error(reason: str) -> ProtocolError:
    return ProtocolError(
        f"body: {reason}", code="request_timeout", status=408, headers=CLOSE_HEADERS
    )


def _too_large_error(max_size: int) -> ProtocolError:
    return ProtocolError(
        f"body: is too long, expected at most {max_size} bytes",
        code="request_too_large",
        status=413,
        headers=CLOSE_HEADERS,
    )


def encode_json(value: Any) -> str:
    """Serialise to compact JSON."""
    return _JSON_ENCODER.encode(value)


_JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Shared JSON encoder, because ``json.dumps`` would make one per call."""
