"""Client: owner and connection of a request or a WebSocket, for which jobs run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


DISCONNECT_ERRORS = (ClientGoneError, OSError)
"""Errors raised when the client is gone; servers raise OSError."""


class Client(Protocol):
    """Client of one request, or of one WebSocket.

    Attributes:
        owner: digest of the client's token; empty if no token is required. Owners take turns.
    """

    owner: str

    async def wait_for_disconnect(self) -> None:
        """Wait until the client closes its connection. Several tasks may wait."""
        ...


async def call_while_connected(client: Client, call: Callable[[], Awaitable[T]]) -> T:
    """Await ``call()``, and cancel it when the client closes its connection.

    Raises:
        ClientGoneError: if the client has gone.
    """
    async with task_group() as tasks:

        async def cancel_when_gone() -> None:
            await client.wait_for_disconnect()
            tasks.cancel_scope.cancel()

        tasks.start_soon(cancel_when_gone)
        # A client may have gone while its request waited for memory: look before the call.
        await anyio.lowlevel.checkpoint()
        result = await call()
        tasks.cancel_scope.cancel()
        return result
    raise ClientGoneError


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Task group that raises the first error itself, and not an ExceptionGroup."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
        return
    except ExceptionGroup as group:
        first = group.exceptions[0]
    try:
        # Outside of ``except``: else the error's context would be the group, which refers to it.
        raise first
    finally:
        del first  # Break the cycle of exception and traceback, whose frames refer to requests.
