"""make_protocols: uvicorn's protocols with limits on clients.

uvicorn waits without limit for the rest of a header, for a body that its application does not read,
and for a client that does not read its answer. It parses all received data in one go,
counts idle connections like busy ones, answers pings of a client that does not read, and buffers
any number of fragments and of long messages. HttpProtocol and WebSocketProtocol bound all of these.
"""

from __future__ import annotations

import math

try:
    import resource
except ModuleNotFoundError:  # Windows has no limit on open files.
    resource = None

from asyncllm.serving.byte_budget import ByteBudget
from asyncllm.serving.connection_limits import ConnectionLimits
from asyncllm.serving.http_protocol import HttpProtocol
from asyncllm.serving.parse_queue import ParseQueue, RequestStartQueue
from asyncllm.serving.websocket_protocol import WebSocketProtocol

RESERVED_FILE_DESCRIPTORS = 128
"""Number of file descriptors that connections leave to the rest of the process."""

MAX_LONG_MESSAGES_BYTES = 1 << 24
"""Maximum total bytes of the long WebSocket messages that are read or decoded at the same time. A
message of several frames counts as ``max_message_size`` bytes."""


def make_protocols(limits: ConnectionLimits) -> tuple[type[HttpProtocol], type[WebSocketProtocol]]:
    """Make subclasses of HttpProtocol and WebSocketProtocol, for uvicorn to instantiate. Their
    class attributes are shared by all connections of one server."""
    max_open_connections = min(
        2 * limits.max_connections, max(1, _max_open_files() - RESERVED_FILE_DESCRIPTORS)
    )
    shared_attributes = {
        "limits": limits,
        "max_open_connections": max_open_connections,
        "idle_connections": {},
    }
    shared_attributes |= {"parse_queue": ParseQueue(), "start_queue": RequestStartQueue()}
    long_message_budget = ByteBudget(MAX_LONG_MESSAGES_BYTES)
    return (
        type("HttpProtocol", (HttpProtocol,), shared_attributes),
        type(
            "WebSocketProtocol",
            (WebSocketProtocol,),
            shared_attributes | {"long_message_budget": long_message_budget},
        ),
    )


def _max_open_files() -> float:
    """Maximum number of files that the process may open. A connection beyond it would be neither
    accepted nor refused."""
    if resource is None:
        return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft
