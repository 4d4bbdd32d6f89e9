"""HttpParser: h11's parser with bounds on lines and chunks, which parses in turns."""

from __future__ import annotations

import re
from typing import Any

import h11

from asyncllm.serving.turns import EVENTS_PER_TURN

MAX_HEADER_LINES = 128
"""Most lines of a request's header. h11 reads a header in one piece, some microseconds a line."""

MAX_CHUNK_LINE = 4096
"""Most bytes of a chunk's line or of the trailers that come in parts."""

FREE_CHUNKS = 1024
BYTES_PER_CHUNK = 64
"""A body may have FREE_CHUNKS chunks, and one more for each BYTES_PER_CHUNK bytes."""

_BLANK_LINE = re.compile(rb"\n\r?\n")


class HttpParser(h11.Connection):
    """Server's side of a connection.

    Args:
        max_header_size: bytes of a request's line and fields.

    Attributes:
        fault: what is wrong with the request, where a bound of this class refused it.
        needs_data: everything received has been parsed.
        is_spent: the turn ended before the data did.
    """

    def __init__(self, max_header_size: int) -> None:
        super().__init__(h11.SERVER, max_header_size)
        self.fault: str | None = None
        self.needs_data = True
        self.is_spent = False
        self._events_left = 0
        self._num_lines = 0
        self._num_chunks = self._num_bytes = 0

    def begin_turn(self) -> None:
        self._events_left = EVENTS_PER_TURN
        self.is_spent = False

    def receive_data(self, data: bytes) -> None:
        if self.their_state is h11.IDLE:
            self._num_lines += data.count(b"\n")
        super().receive_data(data)

    def next_event(self) -> Any:
        if not self._events_left:
            self.is_spent = True
            return h11.NEED_DATA
        if self._num_lines > MAX_HEADER_LINES and self.their_state is h11.IDLE:
            self._check_lines()
        event = super().next_event()
        self.needs_data = event is h11.NEED_DATA
        if isinstance(event, h11.Data):
            self._events_left -= 1
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // BYTES_PER_CHUNK:
                raise self._refuse(
                    f"body: has {self._num_chunks} chunks in {self._num_bytes} bytes, expected at "
                    f"most {FREE_CHUNKS} and one more for each {BYTES_PER_CHUNK} bytes"
                )
        elif isinstance(event, h11.Request):
            self._begin(event)
        elif self.needs_data and self.their_state is h11.SEND_BODY:
            if len(self.trailing_data[0]) > MAX_CHUNK_LINE:
                raise self._refuse(
                    f"body: has a chunk's line, or trailers, of more than {MAX_CHUNK_LINE} bytes"
                )
        return event

    def _begin(self, request: h11.Request) -> None:
        self._num_lines = self.trailing_data[0].count(b"\n")
        self._num_chunks = self._num_bytes = 0
        names = {name for name, _ in request.headers}
        if names >= {b"content-length", b"transfer-encoding"}:
            raise self._refuse("header: has Content-Length and Transfer-Encoding, expected one")

    def _check_lines(self) -> None:
        head = _BLANK_LINE.split(self.trailing_data[0], 1)[0]
        if head.count(b"\n") > MAX_HEADER_LINES:
            raise self._refuse(f"header: has more than {MAX_HEADER_LINES} lines")

    def _refuse(self, fault: str) -> h11.RemoteProtocolError:
        self.fault = fault
        return h11.RemoteProtocolError(fault)
