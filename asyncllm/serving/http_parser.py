"""HttpParser: h11's parser, with limits on header lines, on chunks, and on events per turn."""

from __future__ import annotations

import re
from typing import Any

import h11

from asyncllm.serving.parse_queue import MAX_EVENTS_PER_PARSE_TURN

MAX_HEADER_LINES = 128
"""Maximum number of lines of a request's header, and of its trailers. h11 parses them in one piece,
which takes some microseconds per line."""

MAX_HEADER_COMMAS = 1024
"""Maximum number of commas in a request's header. h11 splits some fields at commas repeatedly."""

MAX_BLANKS_IN_A_ROW = 64
"""Maximum number of spaces and tabs in a row in a header, in trailers and in a chunk's line. The
time of h11's regular expressions is quadratic in this number: 30,000 take 4 s."""

MAX_TARGET_BYTES = 8192
"""Maximum number of bytes of a request's target: every request decodes its path and query."""

MAX_CHUNK_LINE_BYTES = 4096
"""Maximum number of bytes of an incomplete chunk header, or of incomplete trailers."""

BASE_MAX_CHUNKS = 1024
BODY_BYTES_PER_EXTRA_CHUNK = 64
"""A body may have BASE_MAX_CHUNKS chunks, and one more per BODY_BYTES_PER_EXTRA_CHUNK bytes."""

_BLANK_LINE_PATTERN = re.compile(rb"\n\r?\n")

_LAST_CHUNK_PATTERN = re.compile(rb"(?:\r\n)?0+[ \t]*(?:;[^\n]*)?\r?\n")
"""Pattern of the last chunk's line. The line end of the chunk before it may precede it."""


class HttpParser(h11.Connection):
    """HTTP/1.1 parser of a server's connection.

    Args:
        max_header_size: maximum number of bytes of a request line with its header fields.

    Attributes:
        limit_error: error message if the request exceeds a limit, else None.
        needs_data: whether all received data has been parsed.
        has_used_up_turn: whether parsing stopped at MAX_EVENTS_PER_PARSE_TURN.
    """

    def __init__(self, max_header_size: int) -> None:
        super().__init__(h11.SERVER, max_header_size)
        self.limit_error: str | None = None
        self.needs_data = True
        self.has_used_up_turn = False
        self._events_left = 0
        self._num_header_lines = self._num_header_commas = self._num_header_blanks = 0
        self._num_chunks = self._num_body_bytes = 0
        self._is_at_chunk_line = self._is_at_trailers = False

    def reset_event_budget(self) -> None:
        """Begin a parse turn: allow MAX_EVENTS_PER_PARSE_TURN more events."""
        self._events_left = MAX_EVENTS_PER_PARSE_TURN
        self.has_used_up_turn = False

    @property
    def num_parsed_events(self) -> int:
        """Number of pieces of bodies that were parsed since ``reset_event_budget``."""
        return MAX_EVENTS_PER_PARSE_TURN - self._events_left

    def receive_data(self, data: bytes) -> None:
        if self.their_state is h11.IDLE:
            self._num_header_lines += data.count(b"\n")
            self._num_header_commas += data.count(b",")
            self._num_header_blanks += data.count(b" ") + data.count(b"\t")
        super().receive_data(data)

    def next_event(self) -> Any:
        if not self._events_left:
            self.has_used_up_turn = True
            return h11.NEED_DATA
        may_exceed_limits = (
            self._num_header_lines > MAX_HEADER_LINES
            or self._num_header_commas > MAX_HEADER_COMMAS
            or self._num_header_blanks > MAX_BLANKS_IN_A_ROW
        )
        if may_exceed_limits and self.their_state is h11.IDLE:
            head = _BLANK_LINE_PATTERN.split(self.trailing_data[0], 1)[0]
            if head.count(b"\n") > MAX_HEADER_LINES:
                raise self._make_error(f"header: has more than {MAX_HEADER_LINES} lines")
            if head.count(b",") > MAX_HEADER_COMMAS:
                raise self._make_error(f"header: has more than {MAX_HEADER_COMMAS} commas")
            self._check_blanks("header", head)
        if self._is_at_chunk_line and self.their_state is h11.SEND_BODY:
            self._check_chunk_line()
        event = super().next_event()
        self.needs_data = event is h11.NEED_DATA
        if isinstance(event, h11.Data):
            self._events_left -= 1
            self._num_chunks += event.chunk_start
            self._num_body_bytes += len(event.data)
            self._is_at_chunk_line = bool(event.chunk_end)
            max_chunks = BASE_MAX_CHUNKS + self._num_body_bytes // BODY_BYTES_PER_EXTRA_CHUNK
            if self._num_chunks > max_chunks:
                raise self._make_error(
                    f"body: has {self._num_chunks} chunks in {self._num_body_bytes} bytes, "
                    f"expected at most {BASE_MAX_CHUNKS} and one more for each "
                    f"{BODY_BYTES_PER_EXTRA_CHUNK} bytes"
                )
        elif isinstance(event, h11.Request):
            self._begin_request(event)
        elif self.needs_data and self.their_state is h11.SEND_BODY:
            if len(self.trailing_data[0]) > MAX_CHUNK_LINE_BYTES:
                raise self._make_error(
                    "body: has a chunk's line, or trailers, of more than "
                    f"{MAX_CHUNK_LINE_BYTES} bytes"
                )
        return event

    def _check_chunk_line(self) -> None:
        """Check the line of the next chunk, and the trailers behind the last one, before h11 parses
        them in one piece."""
        data = self.trailing_data[0]
        self._is_at_trailers = self._is_at_trailers or bool(_LAST_CHUNK_PATTERN.match(data))
        if self._is_at_trailers:
            head = _BLANK_LINE_PATTERN.split(data, 1)[0]
            if head.count(b"\n") > MAX_HEADER_LINES:
                raise self._make_error(f"body: has more than {MAX_HEADER_LINES} trailers")
        else:
            head = data.removeprefix(b"\r\n").split(b"\r\n", 1)[0]
        self._check_blanks("body", head)

    def _check_blanks(self, name: str, head: bytes) -> None:
        too_many = b" " * (MAX_BLANKS_IN_A_ROW + 1)
        if len(head) > MAX_BLANKS_IN_A_ROW and too_many in head.replace(b"\t", b" "):
            raise self._make_error(
                f"{name}: has more than {MAX_BLANKS_IN_A_ROW} spaces and tabs in a row"
            )

    def _begin_request(self, request: h11.Request) -> None:
        self._num_header_lines = self.trailing_data[0].count(b"\n")
        self._num_header_commas = self.trailing_data[0].count(b",")
        # Check the next header in any case: its blanks may have arrived with this request's body.
        self._num_header_blanks = MAX_BLANKS_IN_A_ROW + 1
        self._num_chunks = self._num_body_bytes = 0
        if len(request.target) > MAX_TARGET_BYTES:
            raise self._make_error(f"target: has more than {MAX_TARGET_BYTES} bytes")
        names = {name for name, _ in request.headers}
        self._is_at_chunk_line, self._is_at_trailers = b"transfer-encoding" in names, False
        if names >= {b"content-length", b"transfer-encoding"}:
            raise self._make_error("header: has Content-Length and Transfer-Encoding, expected one")

    def _make_error(self, message: str) -> h11.RemoteProtocolError:
        self.limit_error = message
        return h11.RemoteProtocolError(message)
