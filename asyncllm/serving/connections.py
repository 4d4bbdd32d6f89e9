"""uvicorn's protocols with limits on clients, and a fast path for streamed events.

uvicorn waits without limit for the rest of a header, for a body that its application does not read,
and for a client that does not read its answer. It parses everything it has received in one go,
counts idle connections like busy ones, answers pings of a client that does not read, and collects
any number of fragments. The protocols here bound all of these.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl, service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State

try:
    import resource
except ModuleNotFoundError:  # Windows has no such limits
    resource = None

from starlette.types import Receive, Scope, Send

from asyncllm import validation as check
from asyncllm.serving.http_parser import HttpParser
from asyncllm.serving.turns import EVENTS_PER_TURN, Starts, Turns

MAX_FRAGMENTS = 1024
"""Maximum number of fragments of a WebSocket message. Without a limit, a client could send empty
fragments for ever."""

HTTP_SLICE_BYTES = 1 << 14
"""Number of bytes that the HTTP parser gets at a time; it checks its bounds after each slice."""

FRAME_SLICE_BYTES = 256, 4096
"""Minimum and maximum number of bytes that the WebSocket parser gets at a time. It parses every
frame in them."""

MAX_DISCARDED = 1 << 16
"""Maximum number of bytes that are read and dropped after an answer that left the request's body
unread."""

SPARE_FILES = 128
"""Number of open files that the process may need besides connections."""

LINGER = 1.0
"""Seconds until a connection is closed after an answer that left the request's body unread. Closed
at once, a client that still sends would get a reset, and would lose the answer."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on connections, checked.

    Attributes:
        max_connections: maximum number of connections whose requests are served; requests of others
            are answered with 503. To send this answer, the server accepts twice as many
            connections, but at most 128 fewer than the process may open files. At both bounds the
            oldest connections between requests, or without a whole header, are closed first.
        max_header_size: maximum number of bytes of a request line with its header fields.
        max_message_size: maximum number of bytes of a WebSocket message.
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


def make_protocols(limits: ConnectionLimits) -> tuple[type[HttpProtocol], type[WebSocketProtocol]]:
    """Make subclasses of HttpProtocol and WebSocketProtocol, for uvicorn to instantiate. The
    connections of one server share their class attributes."""
    max_open = min(2 * limits.max_connections, max(1, _max_open_files() - SPARE_FILES))
    shared = {"limits": limits, "max_open": max_open, "idle": {}}
    shared |= {"turns": Turns(), "starts": Starts()}
    return (
        type("HttpProtocol", (HttpProtocol,), shared),
        type("WebSocketProtocol", (WebSocketProtocol,), shared),
    )


def _max_open_files() -> float:
    """Maximum number of files that the process may open. A connection beyond it would be neither
    accepted nor refused."""
    if resource is None:
        return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


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
    """Mixin of the HTTP and WebSocket protocols: parses in turns, and closes the connection of a
    client that leaves its answer unread.

    The transport pauses its protocol as soon as the kernel accepts no more data, with TLS after 64
    KiB. So no stream runs ahead of its client, and the timer runs for a whole answer too.

    Class attributes:
        max_open: maximum number of connections that are accepted.
        turns, starts: queues for parsing and for beginning requests, of all connections.
        idle: the server's connections without a whole header, the oldest first.
    """

    limits: ClassVar[ConnectionLimits]
    max_open: ClassVar[int]
    turns: ClassVar[Turns]
    starts: ClassVar[Starts]
    idle: ClassVar[dict[HttpProtocol, None]]
    transport: asyncio.Transport

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._send_timer = _Timer(self.limits.send_timeout, lambda: self.transport.abort())
        self._unparsed = bytearray()
        self._waits_for_turn = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # A TLS transport pauses when its buffer reaches the limit: with 0 an empty one would.
        transport.set_write_buffer_limits(high=1)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if self._waits_for_turn:
            # uvicorn may have resumed reading, and TLS may deliver data after a pause.
            self.transport.pause_reading()
        else:
            self._parse()

    def _parse(self) -> None:
        """Parse the received data, at most one turn's worth."""
        raise NotImplementedError

    def _may_read(self) -> bool:
        """Whether reading may resume. A connection that waits for its turn does not ask."""
        raise NotImplementedError

    def _take_unparsed(self, size: int) -> bytes:
        data = bytes(self._unparsed[:size])
        del self._unparsed[:size]
        return data

    def _wait_for_turn(self) -> None:
        self._waits_for_turn = True
        self.transport.pause_reading()
        self.turns.add(self._begin_turn)

    def _begin_turn(self) -> None:
        self._waits_for_turn = False
        if not self.transport.is_closing():
            self._resume_reading()
            self._parse()

    def _resume_reading(self) -> None:
        if not self._waits_for_turn and self._may_read():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._send_timer.stop()
        self.turns.discard(self._begin_turn)


class _Flow(FlowControl):
    """uvicorn's flow control, with reading resumed by the protocol."""

    def __init__(self, transport: asyncio.Transport, resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._resume = resume

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._resume()


class HttpProtocol(_BoundedProtocol, H11Protocol):
    """An HTTP/1.1 connection."""

    conn: HttpParser

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = HttpParser(self.limits.max_header_size)
        self._header_timer = _Timer(self.limits.header_timeout, lambda: self.transport.abort())
        self._linger_timer = _Timer(LINGER, lambda: self.transport.close())
        self._num_discarded: int | None = None
        self._application: Any = self.app
        self.app: Any = self._run_application

    async def _run_application(self, scope: Scope, receive: Receive, send: Send) -> None:
        application: Any = service_unavailable
        if self._make_room(self.limits.max_connections):
            application = self._application
            await self.starts.wait(self.transport.is_closing)
        if self.transport.is_closing():
            self.cycle.disconnected = True  # uvicorn expects an answer to every other request
            return
        answer = _Answer(self, send)
        await application(scope, receive, answer.send)

    def _make_room(self, count: int) -> bool:
        """Close idle connections, the oldest first, until at most ``count`` connections are open.

        Returns:
            Whether at most ``count`` are open now.
        """
        while len(self.connections) > count:
            for other in self.idle:
                # An idle connection with unsent data is still sending its last answer.
                if not other.transport.get_write_buffer_size():
                    break
            else:
                return False
            del self.idle[other]
            self.connections.discard(other)  # uvicorn would discard it one iteration later
            other.transport.abort()
        return True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, self._resume_reading)
        if self._make_room(self.max_open):
            self.idle[self] = None
            self._header_timer.start()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._num_discarded is None:
            super().data_received(data)
            return
        self._num_discarded += len(data)
        if self._num_discarded > MAX_DISCARDED:
            self.transport.pause_reading()

    def _may_read(self) -> bool:
        return not self.flow.read_paused

    def _parse(self) -> None:
        self.conn.begin_turn()
        while True:
            if self._unparsed and self.conn.needs_data:
                self.conn.receive_data(self._take_unparsed(HTTP_SLICE_BYTES))
            super().handle_events()
            if self._num_discarded is not None or self.transport.is_closing():
                return
            if self.transport.get_protocol() is not self:
                return
            if not (self._unparsed and self.conn.needs_data) or self.conn.is_turn_over:
                break
        is_idle = self.conn.their_state is h11.IDLE
        if not is_idle:
            self.idle.pop(self, None)
        if self.conn.is_turn_over:
            self._wait_for_turn()
        elif is_idle:
            self._header_timer.start()
        else:
            self._header_timer.stop()

    def handle_events(self) -> None:
        """Queue a pipelined request for its turn; uvicorn calls this after each answer."""
        self.idle[self] = None
        if self._unparsed or not self.conn.needs_data:
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        super()._wait_for_turn()
        self._header_timer.stop()
        self._unset_keepalive_if_required()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._header_timer.stop()
        self.idle.pop(self, None)
        if not self._make_room(self.limits.max_connections):
            self._refuse(503, "Service Unavailable", ("retry-after", "1"))
            return
        # Move a pause of writing to the new protocol. Writing is paused if the client has not read
        # an earlier answer, or with TLS the session tickets.
        paused = self.flow.write_paused
        self.resume_writing()
        super().handle_websocket_upgrade(event)
        opened: Any = self.transport.get_protocol()
        if not opened.handshake_initiated:
            # websockets refuses some headers, such as a Content-Length, and sends no answer.
            self.connections.discard(opened)
            self.connections.add(self)
            self.transport.set_protocol(self)
            self._refuse(400, "Invalid WebSocket handshake.")
            return
        if paused:
            opened.pause_writing()
        if rest := self.conn.trailing_data[0] + self._unparsed:
            opened.data_received(rest)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(400, self.conn.fault or msg)
        else:
            self.transport.abort()  # the answer has begun, or is complete

    def _refuse(self, status: int, text: str, *more: tuple[str, str]) -> None:
        """Answer in place of the application, and tell it that the client is gone."""
        fields = [
            ("content-type", "text/plain; charset=utf-8"),
            ("content-length", str(len(text))),
            ("connection", "close"),
            *more,
        ]
        head = h11.Response(status_code=status, headers=fields, reason=HTTPStatus(status).phrase)
        for part in (head, h11.Data(data=text.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.linger()

    def linger(self) -> None:
        """Close the sending side, and drop what the client sends until the connection is closed."""
        self._num_discarded = 0
        self._unparsed.clear()
        self._waits_for_turn = False
        self.turns.discard(self._begin_turn)
        self.idle[self] = None
        self._header_timer.stop()
        self._linger_timer.start()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_timer.stop()
        self._linger_timer.stop()
        self.idle.pop(self, None)


class _Answer:
    """ASGI ``send`` of one request, and the transport of its answer.

    The head is sent with the body's first part, as ASGI requires: one system call less before the
    first text. Parts of a chunked answer do not pass through h11: its event, checks and writer
    would be most of the cost of a streamed event."""

    def __init__(self, protocol: HttpProtocol, send: Send) -> None:
        self._cycle: RequestResponseCycle = protocol.cycle
        self._flow = protocol.flow
        self._linger = protocol.linger
        self._send = send
        self._chunked = self._is_starting = False
        self._head = b""
        self._transport = protocol.transport
        self._cycle.transport = cast(asyncio.Transport, self)

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
        if self._cycle.more_body and CLOSE_HEADER not in (fields := message.get("headers", ())):
            message = {**message, "headers": [*fields, CLOSE_HEADER]}
        self._is_starting = True
        try:
            await self._send(message)
        finally:
            self._is_starting = False
        scope = self._cycle.scope
        # The conditions under which h11 chunks the answer.
        self._chunked = (
            scope["http_version"] == "1.1"
            and scope["method"] != "HEAD"
            and message["status"] not in (204, 304)
            and all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
        )

    def write(self, data: bytes) -> None:
        """Write data for uvicorn, in place of the transport; hold back the head."""
        if self._is_starting:
            self._head = data
            return
        if self._head:
            self._head, data = b"", self._head + data
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection for uvicorn, in place of the transport."""
        if self._cycle.more_body and self._cycle.response_complete:
            self._linger()
        else:
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class WebSocketProtocol(_BoundedProtocol, WebSocketsSansIOProtocol):
    """A WebSocket connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = self.limits.close_timeout
        self._num_frames = 0

    def shutdown(self) -> None:
        """Close with 1001, and wait for the client's answer as after a close by the application."""
        if not self.handshake_complete:
            super().shutdown()
        elif self.conn.state is State.OPEN:  # otherwise the connection is already closing
            self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.GOING_AWAY})
            self.conn.send_close(CloseCode.GOING_AWAY, "the server is closing")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
            self.read_paused = False
            self._resume_parsing()

    async def send(self, message: Any) -> None:
        if not self.handshake_complete:
            await super().send(message)
            if self.handshake_complete and not self.transport.is_closing():
                self._resume_parsing()
            return
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.close_sent or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        if (text := message.get("text")) is None:
            await super().send(message)
            return
        # websockets would make a Frame and a buffer for each text, at more than half of the cost.
        self.transport.write(_text_frame(text.encode()))

    def _parse(self) -> None:
        least, most = FRAME_SLICE_BYTES
        size, self._num_frames = least, 0
        while self._unparsed and self._may_parse() and not self.transport.is_closing():
            if self._num_frames >= EVENTS_PER_TURN:
                self._wait_for_turn()
                return
            before = self._num_frames
            WebSocketsSansIOProtocol.data_received(self, self._take_unparsed(size))
            size = least if self._num_frames > before else min(2 * size, most)
        if not self._may_read() and not self.transport.is_closing():
            self.transport.pause_reading()

    def _resume_parsing(self) -> None:
        """Parse the data received since parsing stopped, and resume reading."""
        if self._unparsed:
            self._wait_for_turn()
        self._resume_reading()

    def handle_events(self) -> None:
        self._num_frames += len(self.conn.events)
        super().handle_events()

    def _may_parse(self) -> bool:
        # Before the handshake is answered, the client may turn out to have no access.
        is_decided = self.handshake_complete or not self.handshake_initiated
        return is_decided and not self.read_paused  # paused: an unread message

    def _may_read(self) -> bool:
        # Pongs would pile up while writing is paused.
        return self.writable.is_set() and self._may_parse()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._resume_reading()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._resume_parsing()
        return message

    def handle_cont(self, event: Frame) -> None:
        if self.close_sent:
            return
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        else:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()


def _text_frame(data: bytes) -> bytes:
    """Encode a text message as one server frame without extensions (RFC 6455, section 5.2)."""
    length = len(data)
    if length < 126:
        return b"\x81%c%b" % (length, data)
    if length < 1 << 16:
        return b"\x81\x7e%b%b" % (length.to_bytes(2, "big"), data)
    return b"\x81\x7f%b%b" % (length.to_bytes(8, "big"), data)
