"""WebSocket frames, byte by byte."""

from __future__ import annotations

UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
TEXT, BINARY, CLOSE, PING, PONG, FIN = 1, 2, 8, 9, 10, 0x80


def frame(opcode, data=b"", length=None):
    length = len(data) if length is None else length
    head = bytes([opcode, 0x80 | length]) if length < 126 else b""
    return (head or bytes([opcode, 0xFF]) + length.to_bytes(8, "big")) + bytes(4) + data


def heard(data):
    """Frames of a server as (opcode, payload)."""
    found = []
    while data:
        length, begin = data[1], 2
        if length >= 126:
            begin = 4 if length == 126 else 10
            length = int.from_bytes(data[2:begin], "big")
        found.append((data[0] & 15, data[begin : begin + length]))
        data = data[begin + length :]
    return found
