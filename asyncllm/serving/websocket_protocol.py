"""WebSocketProtocol: uvicorn's WebSockets with limits on clients."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State

from asyncllm.serving.bounded_protocol import BoundedProtocol
from asyncllm.serving.turns import EVENTS_PER_TURN

MAX_FRAGMENTS = 1024
"""Maximum number of fragments of a WebSocket message. Without a limit, a client could send empty
fragments for ever."""

FRAME_SLICE_BYTES = 256, 4096
"""Minimum and maximum number of bytes that the WebSocket parser gets at a time. It parses every
frame in them."""


class WebSocketProtocol(BoundedProtocol, WebSocketsSansIOProtocol):
    """A WebSocket connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = self.limits.close_timeout
        self._num_frames = 0

    def shutdown(self) -> None:
        """Close with 1001, and wait for the client's answer as after a close by the application."""
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
        self.transport.write(_encode_text_frame(text.encode()))

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
        events = self.conn.events
        self._num_frames += len(events)
        super().handle_events()
        for event in events:
            if isinstance(event, Frame):
                event.data = b""  # websockets' parser refers to the last frame until the next one

    def _may_parse(self) -> bool:
        # Before the handshake is answered, the client may turn out to have no access.
        is_decided = self.handshake_complete or not self.handshake_initiated
        return is_decided and not self.read_paused  # Reading is paused while a message is unread.

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


def _encode_text_frame(data: bytes) -> bytes:
    """Encode a text message as one server frame without extensions (RFC 6455, section 5.2)."""
    length = len(data)
    if length < 126:
        return b"\x81%c%b" % (length, data)
    if length < 1 << 16:
        return b"\x81\x7e%b%b" % (length.to_bytes(2, "big"), data)
    return b"\x81\x7f%b%b" % (length.to_bytes(8, "big"), data)
