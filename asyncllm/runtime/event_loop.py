"""Event loop backends: what the engine needs of asyncio (uvloop included) and of trio.

A backend calls a function on its loop from any thread, and suspends a task until it is woken.
It is found, not configured: the loop that reads a stream is the loop that is woken.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Protocol


class EventLoopBackend(Protocol):
    """One event loop. A waiter is what a suspended task awaits, made and woken on the loop's
    own thread: on asyncio a bare future, because every object and every call between it and
    the task would be paid for by each reader in each step."""

    def post(self, callback: Callable[[], Any]) -> None:
        """Calls ``callback`` on the loop soon; any thread. RuntimeError if it is closed."""
        ...

    def make_waiter(self) -> Any:
        """A waiter for one wait, None if the caller does not run on this loop. Asked for each
        wait, so the test is cheap rather than perfect: a second asyncio loop of the same
        thread passes, and fails in asyncio itself."""
        ...

    def wake(self, waiter: Any) -> None:
        """Ends the wait; a waiter that was woken or cancelled before is left as it is."""
        ...

    async def wait_at_most(self, waiter: Any, seconds: float) -> None:
        """Returns when it is woken or after ``seconds``; can be called again."""
        ...

    def is_closed(self) -> bool: ...


class AsyncioBackend:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread = threading.get_ident()

    def post(self, callback: Callable[[], Any]) -> None:
        self.loop.call_soon_threadsafe(callback)

    def make_waiter(self) -> asyncio.Future[None] | None:
        loop = self.loop
        if threading.get_ident() != self._thread or loop.is_closed():
            return None
        return loop.create_future()

    def wake(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    async def wait_at_most(self, waiter: asyncio.Future[None], seconds: float) -> None:
        await asyncio.wait({waiter}, timeout=seconds)

    def is_closed(self) -> bool:
        return self.loop.is_closed()


class TrioWaiter:
    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def __await__(self) -> Generator[Any, Any, None]:
        return self.event.wait().__await__()


class TrioBackend:
    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()

    def post(self, callback: Callable[[], Any]) -> None:
        # trio.RunFinishedError is a RuntimeError, as a closed asyncio loop's is.
        self._token.run_sync_soon(callback)

    def make_waiter(self) -> TrioWaiter | None:
        lowlevel = self._trio.lowlevel
        if lowlevel.in_trio_run() and lowlevel.current_trio_token() is self._token:
            return TrioWaiter(self._trio.Event())
        return None

    def wake(self, waiter: TrioWaiter) -> None:
        waiter.event.set()

    async def wait_at_most(self, waiter: TrioWaiter, seconds: float) -> None:
        with self._trio.move_on_after(seconds):
            await waiter

    def is_closed(self) -> bool:
        # A trio run can only be asked by giving it something to do.
        try:
            self._token.run_sync_soon(_nothing, idempotent=True)
        except RuntimeError:
            return True
        return False


def _nothing() -> None:
    return None


def running_trio() -> Any:
    """The trio module if this thread is in a trio run, else None. Another thread may be in
    the middle of importing it."""
    trio = sys.modules.get("trio")
    in_trio_run = getattr(getattr(trio, "lowlevel", None), "in_trio_run", None)
    return trio if in_trio_run is not None and in_trio_run() else None


def running_backend() -> EventLoopBackend:
    """The backend of the running loop.

    Raises:
        RuntimeError: if no event loop runs in this thread.
    """
    trio = running_trio()
    if trio is not None:
        return TrioBackend(trio)
    return AsyncioBackend(asyncio.get_running_loop())


class ThreadFuture:
    """A future that another thread completes, awaited on the loop on which this is made. If
    the wait is cancelled, the future is left alone."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self._backend = running_backend()
        self._waiter = self._backend.make_waiter()
        future.add_done_callback(self._completed)

    def _completed(self, _: Future[Any]) -> None:
        # Without the loop, when it is closed, nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._backend.post(self._wake)

    def _wake(self) -> None:
        self._backend.wake(self._waiter)

    async def wait(self) -> Any:
        """Its result."""
        await self._waiter
        return self._future.result()

    async def wait_at_most(self, seconds: float) -> None:
        """Returns when it is complete or after ``seconds``; can be called again."""
        await self._backend.wait_at_most(self._waiter, seconds)


async def wait_for(future: Future[Any]) -> Any:
    """``ThreadFuture(future).wait()``"""
    return await ThreadFuture(future).wait()


async def join(thread: threading.Thread, timeout: float) -> None:
    """``thread.join(timeout)`` on the running loop. Polls, for no thread can announce its
    own end."""
    backend, deadline = running_backend(), time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < deadline:
        await backend.wait_at_most(backend.make_waiter(), 0.002)
