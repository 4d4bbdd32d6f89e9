"""Event loop backends: asyncio (uvloop included) and trio.

Nothing is configured: the loop that reads a stream is the loop that is woken. anyio detects the
running loop, and serves everything that is not done per token: waits of the engine's methods,
shielded scopes for callbacks, the tasks of a server's connections. This module does three things
for each loop:

- *Waiters*, which every reader needs in every step. An ``anyio.Event`` costs 2.6 times as much as a
  bare future on asyncio, and 3.1 times on uvloop; on trio both cost the same (``python -m
  benchmarks.engine --only wakes``, docs/performance.md).
- *Calls from another thread.* ``anyio.from_thread`` waits until the loop has made the call, but
  the engine thread must not wait for a loop.
- *Timed waits* on asyncio. A task in an anyio cancel scope is never collected if its loop is
  closed, and before anyio 4.16 a deadline swallows a ``Task.cancel()`` of the same turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any

import anyio
import anyio.lowlevel

with contextlib.suppress(ImportError):
    # Import anyio's backend now: at its first use, in start(), the import would block the loop for
    # 30 ms.
    import anyio._backends._asyncio


class AsyncioBackend:
    """Backend of one asyncio loop. ``TrioBackend`` has the same methods.

    Attributes:
        post: thread-safe function that schedules a function on the loop; raises RuntimeError if the
            loop is closed.
        is_closed: thread-safe function that returns whether the loop is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.post: Callable[[Callable[[], Any]], Any] = loop.call_soon_threadsafe
        self.is_closed = loop.is_closed
        self._loop = loop
        self._thread = threading.get_ident()

    def make_waiter(self) -> Any:
        """Make a future for a wait on this loop's thread; None if called on another thread, or if
        the loop is closed. Every wait checks this, so the check has to be cheap: it compares thread
        ids. If a second asyncio loop of the same thread awaits the future, asyncio raises
        RuntimeError."""
        if threading.get_ident() != self._thread or self.is_closed():
            return None
        return self._loop.create_future()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> Callable[[], Any]:
        """Run a coroutine that raises nothing, in the background; called on the loop. Returns the
        function that cancels the task. The caller has to keep the function, because the loop has
        only weak references to tasks."""
        return self._loop.create_task(coroutine).cancel

    async def wait_at_most(self, waiter: asyncio.Future[None], seconds: float) -> None:
        """Wait at most ``seconds``; can be called again for the same waiter."""
        await asyncio.wait({waiter}, timeout=seconds)


class TrioWaiter:
    """trio's Event with the methods of a future."""

    __slots__ = ("_event", "done")

    def __init__(self, event: Any) -> None:
        self._event = event
        self.done: Callable[[], bool] = event.is_set

    def set_result(self, _: None) -> None:
        self._event.set()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._event.wait().__await__()


class TrioBackend:
    """Backend of one trio run."""

    def __init__(self, token: Any) -> None:
        import trio

        # trio.RunFinishedError is a subclass of RuntimeError, which AsyncioBackend.post raises too.
        self.post: Callable[[Callable[[], Any]], Any] = token.run_sync_soon
        self._token = token
        self._trio = trio

    def make_waiter(self) -> Any:
        lowlevel = self._trio.lowlevel
        if lowlevel.in_trio_run() and lowlevel.current_trio_token() is self._token:
            return TrioWaiter(self._trio.Event())
        return None

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> Callable[[], Any]:
        scope = self._trio.CancelScope()

        async def run_in_scope() -> None:
            with scope:
                await coroutine

        context = contextvars.copy_context()
        self._trio.lowlevel.spawn_system_task(run_in_scope, context=context)
        return scope.cancel

    async def wait_at_most(self, waiter: TrioWaiter, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await waiter

    def is_closed(self) -> bool:
        # Schedule a call: only this shows whether a trio run has ended.
        try:
            self._token.run_sync_soon(bool, idempotent=True)
        except RuntimeError:
            return True
        return False


EventLoopBackend = AsyncioBackend | TrioBackend


def running_loop() -> Any:
    """The running asyncio loop, or the token of the trio run.

    Raises:
        RuntimeError: if no event loop runs in this thread.
    """
    return anyio.lowlevel.current_token().native_token


def running_backend() -> EventLoopBackend:
    """The backend of ``running_loop``."""
    loop = running_loop()
    is_asyncio = isinstance(loop, asyncio.AbstractEventLoop)
    return AsyncioBackend(loop) if is_asyncio else TrioBackend(loop)


def post_when_done(future: Future[Any], callback: Callable[[], Any]) -> None:
    """Call ``callback`` on the running loop once another thread has completed ``future``."""
    post = running_backend().post

    def completed(_: Future[Any]) -> None:
        # On a closed loop nothing waits for the callback.
        with contextlib.suppress(RuntimeError):
            post(callback)

    future.add_done_callback(completed)


def post_when_freed(value: object, callback: Callable[[], Any]) -> None:
    """Call ``callback`` on the running loop once nothing refers to ``value`` any more."""
    post = running_backend().post

    def freed() -> None:
        with contextlib.suppress(RuntimeError):
            post(callback)

    weakref.finalize(value, freed).atexit = False


async def wait_for(future: Future[Any]) -> Any:
    """Wait for a future that another thread completes. If the wait is cancelled, the future is
    not."""
    completed = anyio.Event()
    post_when_done(future, completed.set)
    await completed.wait()
    try:
        return future.result()
    finally:
        del future  # Break the cycle of exception, traceback and future.


async def join_thread(thread: threading.Thread, timeout: float) -> None:
    """``thread.join(timeout)`` on the running loop. Polls, because no thread can announce its own
    end."""
    deadline = anyio.current_time() + timeout
    while thread.is_alive() and anyio.current_time() < deadline:  # noqa: ASYNC110
        await anyio.sleep(0.002)
