"""HttpProtocol: uvicorn's HTTP/1.1 with limits on clients, and a fast path for streamed events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, cast

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl, service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from asyncllm.serving.bounded_protocol import MAX_BYTES_PER_PARSE_TURN, BoundedProtocol, Timer
from asyncllm.serving.exchange import BACKLOG_EXTENSION
from asyncllm.serving.http_parser import HttpParser
from asyncllm.serving.parse_queue import RequestStartQueue

HTTP_SLICE_BYTES = 1 << 14
"""Bytes passed to the HTTP parser at a time. It checks its size limits after each slice."""

MAX_DISCARDED_BYTES = 1 << 16
"""Maximum number of a request's remaining bytes that are read and dropped after an answer."""

MAX_EARLY_BYTES = 1 << 14
"""Number of bytes that a client may send ahead of the answer to its last request before reading
pauses. While reading is paused, a client that goes is not noticed."""

LINGER_SECONDS = 1.0
"""Seconds between an answer and the close of its connection, if the request was not read to its
end. After an immediate close, a client that still sends would get a reset and lose the answer."""


class _FlowControl(FlowControl):
    """Flow control that lets the protocol decide whether to pause and resume reading."""

    def __init__(
        self, transport: asyncio.Transport, pause: Callable[[], None], resume: Callable[[], None]
    ) -> None:
        super().__init__(transport)
        self._pause = pause
        self._resume = resume

    def pause_reading(self) -> None:
        self.read_paused = True
        self._pause()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._resume()


class HttpProtocol(BoundedProtocol, H11Protocol):
    """An HTTP/1.1 connection.

    Class attributes:
        max_open_connections: maximum number of connections that are accepted.
        idle_connections: the server's connections that wait for a header, or for the rest of a
            body; the one that has waited longest comes first.
        start_queue: queue of all connections' requests that wait for their handler to start.
    """

    max_open_connections: ClassVar[int]
    start_queue: ClassVar[RequestStartQueue]
    idle_connections: ClassVar[dict[HttpProtocol, None]]
    conn: HttpParser

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = HttpParser(self.limits.max_header_size)
        self._header_timer = Timer(self.limits.header_timeout, lambda: self.transport.abort())
        self._linger_timer = Timer(LINGER_SECONDS, lambda: self.transport.close())
        self._num_discarded_bytes: int | None = None
        self._num_request_bytes = 0
        self._client_state: Any = h11.IDLE
        self._application: Any = self.app
        self.app: Any = self._run_application

    async def _run_application(self, scope: Scope, receive: Receive, send: Send) -> None:
        application: Any = service_unavailable
        if self._close_idle_connections(self.limits.max_connections):
            application = self._application
            await self.start_queue.wait(scope["method"], self.transport.is_closing)
        if self.transport.is_closing():
            # Mark the client as gone; else uvicorn logs that the application has not answered.
            self.cycle.disconnected = True
            return
        extensions: Any = scope.setdefault("extensions", {})
        extensions[BACKLOG_EXTENSION] = {"is_waiting": lambda: self._waits_for_parse_turn}
        answer = _AnswerSender(self, send)
        await application(scope, receive, answer.send)

    def _close_idle_connections(self, max_open: int) -> bool:
        """Close idle connections, the oldest first, until at most ``max_open`` are left.

        Returns:
            Whether at most ``max_open`` are open now.
        """
        while len(self.connections) > max_open:
            for other in self.idle_connections:
                if other is not self and other._may_be_closed():
                    break
            else:
                return False
            del self.idle_connections[other]
            # Discard the connection now; uvicorn does so an iteration of the event loop later.
            self.connections.discard(other)
            other.transport.abort()
        return True

    def _may_be_closed(self) -> bool:
        """Whether all output is sent, and all that has arrived of a request's body is read."""
        if self.conn.our_state is h11.SEND_BODY or self.transport.get_write_buffer_size():
            return False
        has_unread_body = self._waits_for_parse_turn or self.flow.read_paused
        return self.conn.their_state is h11.IDLE or not has_unread_body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _FlowControl(transport, self._pause_reading, self._resume_reading)
        if self._close_idle_connections(self.max_open_connections):
            self.idle_connections[self] = None
            self._header_timer.start()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._num_request_bytes += len(data)
        self._unset_keepalive_if_required()
        if self._num_discarded_bytes is None:
            super().data_received(data)
            if self.flow.read_paused:
                self._pause_reading()
            return
        self._num_discarded_bytes += len(data)
        if self._num_discarded_bytes > MAX_DISCARDED_BYTES:
            self.transport.pause_reading()

    def _may_read(self) -> bool:
        # A client that sends its next request early may still go, which only a read notices.
        is_early = self.conn.their_state is h11.DONE and len(self._unparsed) <= MAX_EARLY_BYTES
        return not self.flow.read_paused or is_early

    def _pause_reading(self) -> None:
        if not self._may_read():
            self.transport.pause_reading()

    def _has_claim(self) -> bool:
        # A smaller body holds no memory of the budget.
        is_large = self._num_request_bytes >= MAX_BYTES_PER_PARSE_TURN
        return is_large and self.conn.their_state is h11.SEND_BODY

    def _parse(self) -> None:
        self.conn.reset_event_budget()
        while True:
            if self._unparsed and self.conn.needs_data:
                self.conn.receive_data(self._pop_unparsed_bytes(HTTP_SLICE_BYTES))
            super().handle_events()
            if self._num_discarded_bytes is not None or self.transport.is_closing():
                return
            if self.transport.get_protocol() is not self:
                return
            if not (self._unparsed and self.conn.needs_data) or self.conn.has_used_up_turn:
                break
        state = self.conn.their_state
        if state is not h11.SEND_BODY:
            self._num_request_bytes = 0
        if state is not self._client_state:
            self._client_state = state
            self.idle_connections.pop(self, None)
            if state in (h11.IDLE, h11.SEND_BODY):
                self.idle_connections[self] = None
        if self.conn.has_used_up_turn:
            self._queue_for_parse_turn()
        elif state is h11.IDLE:
            self._header_timer.start()
        else:
            self._header_timer.stop()

    def _num_parsed_events(self) -> int:
        return self.conn.num_parsed_events

    def handle_events(self) -> None:
        """Queue a pipelined request, if there is one. uvicorn calls this after each answer."""
        self.idle_connections[self] = None
        if self._unparsed or not self.conn.needs_data:
            self._queue_for_parse_turn()

    def _queue_for_parse_turn(self) -> None:
        super()._queue_for_parse_turn()
        self._header_timer.stop()
        self._unset_keepalive_if_required()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._header_timer.stop()
        self.idle_connections.pop(self, None)
        if not self._close_idle_connections(self.limits.max_connections):
            self._refuse(503, "Service Unavailable", ("retry-after", "1"))
            return
        # If writing is paused, pause it in the new protocol too. Writing is paused until the
        # client has read an earlier answer, or the session tickets after a TLS handshake.
        paused = self.flow.write_paused
        self.resume_writing()
        super().handle_websocket_upgrade(event)
        websocket: Any = self.transport.get_protocol()
        if not websocket.handshake_initiated:
            # The websockets library refuses a Content-Length, for example, and sends no answer.
            self.connections.discard(websocket)
            self.connections.add(self)
            self.transport.set_protocol(self)
            self._refuse(400, "Invalid WebSocket handshake.")
            return
        if paused:
            websocket.pause_writing()
        if rest := self.conn.trailing_data[0] + self._unparsed:
            websocket.data_received(rest)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(400, self.conn.limit_error or msg)
        else:
            self.transport.abort()  # Too late for a 400: the answer has begun or ended.

    def _refuse(self, status: int, text: str, *more_headers: tuple[str, str]) -> None:
        """Answer in place of the application, and tell it that the client is gone."""
        fields = [
            ("content-type", "text/plain; charset=utf-8"),
            ("content-length", str(len(text))),
            ("connection", "close"),
            *more_headers,
        ]
        cycle = None if self.cycle is None or self.cycle.response_complete else self.cycle
        is_head_request = cycle is not None and cycle.scope["method"] == "HEAD"
        head = h11.Response(status_code=status, headers=fields, reason=HTTPStatus(status).phrase)
        body = h11.Data(data=b"" if is_head_request else text.encode())
        for part in (head, body, h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self.linger()

    def linger(self) -> None:
        """Close the sending side, and drop the client's data until the connection is closed."""
        self._num_discarded_bytes = 0
        self._unparsed.clear()
        self._waits_for_parse_turn = False
        self.parse_queue.discard(self._begin_parse_turn)
        self.idle_connections[self] = None
        self._header_timer.stop()
        self._linger_timer.start()
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # The client has closed behind its request.
                self.transport.write_eof()
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_timer.stop()
        self._linger_timer.stop()
        self.idle_connections.pop(self, None)


class _AnswerSender:
    """ASGI ``send`` for one request. uvicorn writes the answer to this object, as to a transport.

    The head is sent together with the body's first part, as ASGI requires. This also saves a system
    call before the first text. Parts of a chunked answer do not pass through h11: h11's objects and
    checks would be most of the cost of a streamed event."""

    def __init__(self, protocol: HttpProtocol, send: Send) -> None:
        self._cycle: RequestResponseCycle = protocol.cycle
        self._flow = protocol.flow
        self._linger = protocol.linger
        self._send = send
        self._is_chunked = self._is_starting = False
        self._head = b""
        self._transport = protocol.transport
        self._cycle.transport = cast(asyncio.Transport, self)

    async def send(self, message: Any) -> None:
        if not self._is_chunked or not message.get("more_body"):
            if message["type"] == "http.response.start":
                await self._start(message)
            else:
                await self._send(message)
                # Return only once writing resumes: the application then frees the answer's memory.
                await self._drain()
            return
        cycle = self._cycle
        await self._drain()
        body = message["body"]
        if body and not cycle.disconnected:
            self.write(b"%x\r\n%b\r\n" % (len(body), body))
            if len(body) >= MAX_BYTES_PER_PARSE_TURN:
                # Wait after a long event too: the application then frees its memory.
                await self._drain()

    async def _drain(self) -> None:
        if self._flow.write_paused and not self._cycle.disconnected:
            await self._flow.drain()

    async def _start(self, message: Any) -> None:
        if self._cycle.more_body and CLOSE_HEADER not in (fields := message.get("headers", ())):
            message = {**message, "headers": [*fields, CLOSE_HEADER]}
        self._is_starting = True
        try:
            await self._send(message)
        finally:
            self._is_starting = False
        scope = self._cycle.scope
        # The conditions under which h11 chunks the answer.
        self._is_chunked = (
            scope["http_version"] == "1.1"
            and scope["method"] != "HEAD"
            and message["status"] not in (204, 304)
            and all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
        )

    def write(self, data: bytes) -> None:
        """Write uvicorn's data to the transport; keep the head for the first part of the body."""
        if self._is_starting:
            self._head = data
            return
        if self._head:
            self._head, data = b"", self._head + data
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection; linger if the request was not read to its end."""
        if self._cycle.more_body and self._cycle.response_complete:
            self._linger()
        else:
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
