"""WebSocketProtocol: uvicorn's WebSockets with limits on clients."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, ClassVar

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.streams import StreamReader

from asyncllm.serving.bounded_protocol import MAX_BYTES_PER_PARSE_TURN, BoundedProtocol, Timer
from asyncllm.serving.byte_budget import RATE_CHECK_SECONDS, ByteBudget, ByteClaim
from asyncllm.serving.exchange import OWNER_KEY
from asyncllm.serving.parse_queue import MAX_EVENTS_PER_PARSE_TURN
from asyncllm.serving.sockets import (
    DISCONNECT_EXTENSION,
    RELEASE_EXTENSION,
    UTF8_TEXT_EXTENSION,
)

BASE_MESSAGE_FRAME_LIMIT = 1024
MESSAGE_BYTES_PER_EXTRA_FRAME = 64
"""A fragmented message may have BASE_MESSAGE_FRAME_LIMIT frames, and one more for each
MESSAGE_BYTES_PER_EXTRA_FRAME bytes. Pings and pongs between its fragments count as frames."""

MESSAGE_TIMEOUT_SECONDS = 30.0
"""Seconds that a client may take to send a message of more than MAX_BYTES_PER_PARSE_TURN bytes."""

MIN_SLICE_BYTES, MAX_SLICE_BYTES = 256, 4096
"""Bounds of the number of bytes passed to the WebSocket parser at a time. The parser parses all
frames in these bytes."""


class _FrameReader(StreamReader):
    """The parser's reader, which notes the frame that the parser waits for.

    Attributes:
        is_final: whether the frame is the last of its message.
        num_wanted: number of bytes that the parser waits for: the length of the frame's data once
            its header is read.
    """

    is_final = False
    num_wanted = 0

    def at_eof(self) -> Generator[None, None, bool]:
        """Whether the stream has ended; the parser asks before each frame."""
        has_ended = yield from super().at_eof()
        if not has_ended:
            self.is_final = bool(self.buffer[0] & 0x80)
        return has_ended

    def read_exact(self, n: int) -> Generator[None, None, bytearray]:
        self.num_wanted = n
        return super().read_exact(n)


class WebSocketProtocol(BoundedProtocol, WebSocketsSansIOProtocol):
    """A WebSocket connection.

    Class attributes:
        long_message_budget: budget of bytes for all messages of more than MAX_BYTES_PER_PARSE_TURN.
            A message counts from when the application waits for it until the application
            releases it or asks for the next one, by the length that its frame announces, or as
            the longest if it has several frames.
    """

    long_message_budget: ClassVar[ByteBudget]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = self.limits.close_timeout
        self._num_frames = 0
        self._is_fragmented = False
        self._frames_left = 0.0
        self._disconnect_event = asyncio.Event()
        # Restart the parser, which has read nothing yet, with a reader that knows lengths.
        self.conn.reader = self._reader = _FrameReader()
        self.conn.parser = self.conn.parse()
        next(self.conn.parser)
        self._owner: str | None = None
        self._is_receiving = False
        self._claim: ByteClaim | None = None
        self._message_timer = Timer(MESSAGE_TIMEOUT_SECONDS, self._close_on_message_timeout)
        self._rate_check_timer = Timer(RATE_CHECK_SECONDS, self._check_receive_rate)

    def shutdown(self) -> None:
        """Close with code 1001, and wait up to ``close_timeout`` for the client's answer."""
        if not self.handshake_complete:
            super().shutdown()
        elif self.conn.state is State.OPEN:  # In another state the connection is already closing.
            self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.GOING_AWAY})
            self.conn.send_close(CloseCode.GOING_AWAY, "the server is closing")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
            self.read_paused = False
            self._resume_parsing()

    async def send(self, message: Any) -> None:
        if not self.handshake_complete:
            self._owner = message.get(OWNER_KEY)
            await super().send(message)
            if self.close_sent:
                # The handshake was refused. If it seems incomplete, uvicorn logs an error.
                self.handshake_complete = True
            if self.handshake_complete and not self.transport.is_closing():
                self._resume_parsing()
            return
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.close_sent or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        if (text := message.pop("text", None)) is None:
            await super().send(message)
            return
        # Encode the frame here: websockets' own ``send`` spends more than half of its time on
        # making a Frame and a buffer for each text.
        self.transport.write(_encode_text_frame(text if isinstance(text, bytes) else text.encode()))
        is_long = len(text) > MAX_BYTES_PER_PARSE_TURN
        del text  # The transport has a copy, which the client may read slowly.
        if is_long:
            # Backpressure: after a long message, return only when the client has read it.
            await self.writable.wait()

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            scope: Any = self.scope
            scope["extensions"][UTF8_TEXT_EXTENSION] = {}
            scope["extensions"][DISCONNECT_EXTENSION] = {"event": self._disconnect_event}
            scope["extensions"][RELEASE_EXTENSION] = {"release": self._release_claim}

    def _parse(self) -> None:
        size, self._num_frames = MIN_SLICE_BYTES, 0
        while self._unparsed and self._may_parse() and not self.transport.is_closing():
            if self._num_frames >= MAX_EVENTS_PER_PARSE_TURN:
                self._queue_for_parse_turn()
                return
            if self._has_unclaimed_message():
                self._claim = self.long_message_budget.claim(
                    self._num_announced_bytes(), self._begin_long_message, self._owner
                )
                continue
            num_frames_before = self._num_frames
            WebSocketsSansIOProtocol.data_received(self, self._pop_unparsed_bytes(size))
            has_new_frame = self._num_frames > num_frames_before
            size = MIN_SLICE_BYTES if has_new_frame else min(2 * size, MAX_SLICE_BYTES)
        if not self._may_read() and not self.transport.is_closing():
            self.transport.pause_reading()

    def _num_parsed_events(self) -> int:
        return self._num_frames

    def _num_message_bytes(self) -> int:
        """Number of received bytes of an incomplete message."""
        return len(self.conn.reader.buffer) + (self.conn.current_size or 0)

    def _has_unclaimed_message(self) -> bool:
        """Whether an incomplete message is long and has no memory of the budget yet."""
        return self._claim is None and self._num_message_bytes() > MAX_BYTES_PER_PARSE_TURN

    def _num_announced_bytes(self) -> int:
        """Length of an incomplete long message; the maximum if it has several frames."""
        if self.conn.current_size is None and self._reader.is_final:
            return self._reader.num_wanted
        return self.limits.max_message_size

    def _begin_long_message(self) -> None:
        self._message_timer.start()
        self._rate_check_timer.start()
        if self._claim is not None:  # The grant came late: parsing was waiting for it.
            self._resume_parsing()

    def _check_receive_rate(self) -> None:
        """Close the connection if its message arrives too slowly while other messages wait for the
        budget; else check again later."""
        if self._claim is not None and self._claim.is_too_slow(
            self._num_message_bytes(), is_backlogged=self._waits_for_parse_turn
        ):
            self._close_for_slow_message(
                f"of a message less than {self._claim.min_bytes_per_check >> 10} KiB came per "
                f"{RATE_CHECK_SECONDS:g} seconds, while others waited"
            )
        else:
            self._rate_check_timer.stop()
            self._rate_check_timer.start()

    def _close_on_message_timeout(self) -> None:
        self._close_for_slow_message(
            f"a message did not come within {MESSAGE_TIMEOUT_SECONDS:g} seconds"
        )

    def _close_for_slow_message(self, reason: str) -> None:
        self.conn.fail(CloseCode.POLICY_VIOLATION, reason)
        self.handle_parser_exception()

    def _resume_parsing(self) -> None:
        """Parse the data received since parsing stopped, and resume reading."""
        if self._unparsed:
            self._queue_for_parse_turn()
        self._resume_reading()

    def handle_events(self) -> None:
        events = self.conn.events
        self._num_frames += len(events)
        frames = [event for event in events if isinstance(event, Frame)]
        if any(self._exceeds_frame_limit(frame) for frame in frames) and not self.close_sent:
            reason = (
                f"more than {BASE_MESSAGE_FRAME_LIMIT} frames, and one for each "
                f"{MESSAGE_BYTES_PER_EXTRA_FRAME} bytes, in a message"
            )
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, reason)
            self.handle_parser_exception()
            return
        super().handle_events()
        for frame in frames:
            frame.data = b""  # Free the data: websockets' parser keeps a frame until the next.

    def _exceeds_frame_limit(self, frame: Frame) -> bool:
        """Count a frame of a fragmented message, or one between such frames. Returns whether the
        message has more frames than allowed."""
        is_control = frame.opcode >= Opcode.CLOSE
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._frames_left = BASE_MESSAGE_FRAME_LIMIT
        if self._is_fragmented or not (is_control or frame.fin):
            num_extra = 0 if is_control else len(frame.data) / MESSAGE_BYTES_PER_EXTRA_FRAME
            self._frames_left += num_extra - 1
        if not is_control:
            self._is_fragmented = not frame.fin
        return self._frames_left < 0

    def _has_claim(self) -> bool:
        return self._claim is not None

    def _may_parse(self) -> bool:
        # Until the handshake is answered, the application may still refuse the client.
        is_admitted = self.handshake_complete or not self.handshake_initiated
        has_claim = self._claim is None or self._claim.is_granted
        # An application that is busy, perhaps with an answer that its client does not read, must
        # not keep others waiting for the memory of its next message.
        is_wanted = self._is_receiving or not self._has_unclaimed_message()
        # Reading is paused while a message is unread.
        return is_admitted and has_claim and is_wanted and not self.read_paused

    def _may_read(self) -> bool:
        # Pongs would pile up while writing is paused.
        return self.writable.is_set() and self._may_parse()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._resume_reading()

    async def receive(self) -> Any:
        self._is_receiving = True
        if self._has_unclaimed_message():
            self._resume_parsing()
        self._parse_next_message()
        try:
            message: Any = await self.queue.get()
        finally:
            self._is_receiving = False
        # A long message keeps its claim until the application releases it or asks for the next.
        if self._claim is None:
            self._parse_next_message()
        if (data := message.get("text")) is not None:
            message["text"] = data.decode()
        return message

    def _parse_next_message(self) -> None:
        """Parse the next message, once the application has received the previous one."""
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._release_claim()
            self._resume_parsing()

    def _release_claim(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def send_receive_event_to_app(self) -> None:
        self._stop_timers()
        data = b"".join(self.frames)
        self.frames = []
        if self.curr_msg_data_type == "text" and not _is_utf8(data):
            # Refuse the message here: uvicorn would log an error with a traceback.
            self.conn.fail(CloseCode.INVALID_DATA, "a text message is not UTF-8")
            self.handle_parser_exception()
        elif not self.close_sent:
            # Queue text as UTF-8, unlike uvicorn: one emoji makes a ``str`` four times as large.
            message: Any = {"type": "websocket.receive", self.curr_msg_data_type: data}
            self.queue.put_nowait(message)
            self.read_paused = True
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disconnect_event.set()
        self._stop_timers()
        self._release_claim()

    def _stop_timers(self) -> None:
        self._message_timer.stop()
        self._rate_check_timer.stop()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _encode_text_frame(data: bytes) -> bytes:
    """Encode a text message as one server frame without extensions (RFC 6455, section 5.2)."""
    length = len(data)
    if length < 126:
        return b"\x81%c%b" % (length, data)
    if length < 1 << 16:
        return b"\x81\x7e%b%b" % (length.to_bytes(2, "big"), data)
    return b"\x81\x7f%b%b" % (length.to_bytes(8, "big"), data)
