"""ConnectionLimits: validated limits on a server's connections."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm import validation as check


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on a server's connections.

    Attributes:
        max_connections: maximum number of connections whose requests are served; requests of others
            are answered with 503. To send this answer, the server accepts twice as many
            connections, but leaves 128 of the process's file descriptors free. To stay within
            either bound, the server first closes connections that wait for a request or for the
            rest of one, beginning with the longest wait.
        max_header_size: maximum number of bytes of a request line with its header fields.
        max_message_size: maximum size of a WebSocket message in bytes.
        header_timeout: seconds that a client may take to send a header.
        send_timeout: seconds that a client may leave its answer unread.
        keep_alive: seconds that a connection may be idle between two requests.
        close_timeout: seconds that a client may take to answer a WebSocket's close.
        ping_interval: seconds between pings of a WebSocket; None sends no pings.
        ping_timeout: seconds to wait for the answer to a ping; None waits without limit.
    """

    max_connections: int = 1024
    max_header_size: int = 1 << 15
    max_message_size: int = 4 << 20
    header_timeout: float = 10.0
    send_timeout: float = 60.0
    keep_alive: int = 15
    close_timeout: float = 10.0
    ping_interval: float | None = 30.0
    ping_timeout: float | None = 20.0

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_header_size", "max_message_size", "keep_alive"):
            check.validate_field(self, check.integer, name, 1, 2**30)
        for name in ("header_timeout", "send_timeout", "close_timeout"):
            check.validate_field(self, check.seconds, name, exclusive_low=True)
        for name in ("ping_interval", "ping_timeout"):
            value = check.seconds(name, getattr(self, name), exclusive_low=True, optional=True)
            object.__setattr__(self, name, value)
