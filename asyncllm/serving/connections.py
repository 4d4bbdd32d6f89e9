"""uvicorn's protocols with limits on clients, and a fast path for streamed events.

uvicorn waits for ever for the rest of a header, for the rest of a body that its application does
not read, and for a client that does not read its answer. It limits connections only once their
request has come, answers pings of a client that does not read, and collects any number of
fragments. The protocols here bound all of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State

from asyncllm import validation as check
from asyncllm.serving.exchange import Receive, Scope, Send

MAX_FRAGMENTS = 1024
"""Most fragments of a WebSocket message. Without a limit, empty ones would be collected for
ever."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on connections, checked.

    Attributes:
        max_connections: most connections whose requests are served; others are answered with 503.
            Twice as many are accepted, so that they get this answer.
        max_header_size: bytes of a request's line and fields.
        max_message_size: bytes of a WebSocket message.
        header_timeout: seconds that a client has to send a header, or the rest of a body after its
            answer.
        send_timeout: seconds that a client may leave its answer unread.
        keep_alive: seconds that a connection may be idle between two requests.
        close_timeout: seconds that a client has to answer a WebSocket's close.
        ping_interval, ping_timeout: seconds between pings of a WebSocket, and to wait for the
            answer; None sends no pings.
    """

    max_connections: int = 1024
    max_header_size: int = 1 << 16
    max_message_size: int = 4 << 20
    header_timeout: float = 10.0
    send_timeout: float = 60.0
    keep_alive: int = 15
    close_timeout: float = 10.0
    ping_interval: float | None = 30.0
    ping_timeout: float | None = 20.0

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_header_size", "max_message_size", "keep_alive"):
            check.field(self, check.integer, name, 1, 2**30)
        for name in ("header_timeout", "send_timeout", "close_timeout"):
            check.field(self, check.seconds, name, above=True)
        for name in ("ping_interval", "ping_timeout"):
            value = check.seconds(name, getattr(self, name), above=True, optional=True)
            object.__setattr__(self, name, value)


def protocols(limits: ConnectionLimits) -> tuple[type[HttpProtocol], type[WebSocketProtocol]]:
    """Makes subclasses of both protocols with ``limits``, because uvicorn instantiates classes."""
    return (
        type("HttpProtocol", (HttpProtocol,), {"limits": limits}),
        type("WebSocketProtocol", (WebSocketProtocol,), {"limits": limits}),
    )


class _Timer:
    """Timer of one call; starting it again does not postpone the call."""

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


class _BoundedProtocol(asyncio.Protocol):
    """Mixin of both protocols: closes the connection of a client that leaves its answer unread.

    The transport pauses its protocol as soon as the kernel takes no more data; with TLS after 64
    KiB. So no stream runs ahead of its client, and a whole answer is timed like a stream.
    """

    limits: ClassVar[ConnectionLimits]
    transport: asyncio.Transport

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._send_timer = _Timer(self.limits.send_timeout, self._abort)

    def _abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Not 0: a TLS transport pauses at its limit, not above it, and so would pause when empty.
        transport.set_write_buffer_limits(high=1)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._send_timer.stop()


class HttpProtocol(_BoundedProtocol, H11Protocol):
    """A connection that speaks HTTP/1.1."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timer = _Timer(self.limits.header_timeout, self._abort)
        self._application: Any = self.app
        self.app: Any = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(self.cycle, self.flow, self.transport, send)
        await self._application(scope, receive, answer.send)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > 2 * self.limits.max_connections:
            transport.abort()
        else:
            self._header_timer.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_protocol() is not self:
            return
        theirs = self.conn.their_state
        if theirs is h11.IDLE or (theirs is h11.SEND_BODY and self.conn.our_state is h11.DONE):
            self._header_timer.start()
        else:
            self._header_timer.stop()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._header_timer.stop()
        if len(self.connections) > self.limits.max_connections:
            self._refuse_upgrade()
            return
        # Writing may be paused: an earlier answer is unread, or with TLS the session tickets.
        paused = self.flow.write_paused
        self.resume_writing()
        super().handle_websocket_upgrade(event)
        if paused:
            self.transport.get_protocol().pause_writing()

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

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()  # during an answer, or after it

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_timer.stop()


class _Answer:
    """ASGI ``send`` of one request, and the transport of its answer. The head is sent with the
    body's first part, as ASGI asks: one system call less before the first text.

    It frames the parts of a chunked answer itself: h11 would make an event for each, check it and
    call its writer, which is most of the cost of a streamed event."""

    __slots__ = ("_chunked", "_cycle", "_flow", "_head", "_is_starting", "_send", "_transport")

    def __init__(
        self,
        cycle: RequestResponseCycle,
        flow: FlowControl,
        transport: asyncio.Transport,
        send: Send,
    ) -> None:
        self._cycle = cycle
        self._flow = flow
        self._transport = transport
        self._send = send
        self._chunked = self._is_starting = False
        self._head = b""
        cycle.transport = cast(asyncio.Transport, self)

    async def send(self, message: Any) -> None:
        if not self._chunked or not message.get("more_body"):
            if message["type"] == "http.response.start":
                await self._start(message)
            else:
                await self._send(message)
            return
        cycle = self._cycle
        if self._flow.write_paused and not cycle.disconnected:
            await self._flow.drain()
        body = message["body"]
        if body and not cycle.disconnected:
            self.write(b"%x\r\n%b\r\n" % (len(body), body))

    async def _start(self, message: Any) -> None:
        self._is_starting = True
        try:
            await self._send(message)
        finally:
            self._is_starting = False
        self._chunked = self._will_be_chunked(message)

    def write(self, data: bytes) -> None:
        """Replaces the transport's ``write`` for uvicorn."""
        if self._is_starting:
            self._head = data
            return
        if self._head:
            self._head, data = b"", self._head + data
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _will_be_chunked(self, start: Any) -> bool:
        """Whether h11 will send the answer in chunks."""
        scope = self._cycle.scope
        return (
            scope["http_version"] == "1.1"
            and scope["method"] != "HEAD"
            and start["status"] not in (204, 304)
            and all(name.lower() != b"content-length" for name, _ in start.get("headers", ()))
        )


class WebSocketProtocol(_BoundedProtocol, WebSocketsSansIOProtocol):
    """A connection that speaks WebSocket."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = self.limits.close_timeout

    def shutdown(self) -> None:
        """Closes with 1001, and waits for the client's answer as after the application's close."""
        if not self.handshake_complete:
            super().shutdown()
        elif self.conn.state is State.OPEN:  # else a close is under way
            self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.GOING_AWAY})
            self.conn.send_close(CloseCode.GOING_AWAY, "the server is closing")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
            if self.read_paused:
                self.read_paused = False
                self.transport.resume_reading()

    async def send(self, message: Any) -> None:
        if not self.handshake_complete:
            await super().send(message)
            return
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.close_sent or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        if (text := message.get("text")) is None:
            await super().send(message)
            return
        # websockets would make a Frame and a buffer for each text, which costs more than the rest.
        self.transport.write(_text_frame(text.encode()))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.writable.is_set() and not self.transport.is_closing():
            self.transport.pause_reading()  # else unsent pongs would pile up

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def handle_cont(self, event: Frame) -> None:
        if self.close_sent:
            return
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        else:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()


def _text_frame(data: bytes) -> bytes:
    """Encodes a text message as one server frame without extensions (RFC 6455, section 5.2)."""
    length = len(data)
    if length < 126:
        return b"\x81%c%b" % (length, data)
    if length < 1 << 16:
        return b"\x81\x7e%b%b" % (length.to_bytes(2, "big"), data)
    return b"\x81\x7f%b%b" % (length.to_bytes(8, "big"), data)
