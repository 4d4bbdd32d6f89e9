"""Hosts: what the engine needs of an event loop, for asyncio (uvloop included) and trio.

A host can call a function on its loop from any thread, and suspend a task until it is woken.
It is found, not configured: the loop that reads a stream is the loop that is woken.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from asyncllm.core.channel import Channel


class Waiter(Protocol):
    """One suspended task. Both methods are called on the loop's own thread."""

    def __await__(self) -> Generator[Any, Any, None]:
        """Returns when woken."""
        ...

    async def wait_at_most(self, seconds: float) -> None:
        """Returns when woken or after ``seconds``; can be called again."""
        ...

    def wake(self) -> None: ...


class Host(Protocol):
    """One event loop."""

    def post(self, callback: Callable[[], Any]) -> None:
        """Calls ``callback`` on the loop soon; any thread. RuntimeError if it is closed."""
        ...

    def make_waiter(self) -> Waiter: ...

    def is_closed(self) -> bool: ...

    def is_current(self) -> bool:
        """Whether the caller runs on this loop. Asked for each wait, so it is cheap rather
        than perfect: a second asyncio loop of the same thread passes, and fails in asyncio
        itself."""
        ...


class AsyncioWaiter:
    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future = loop.create_future()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._future.__await__()

    async def wait_at_most(self, seconds: float) -> None:
        await asyncio.wait({self._future}, timeout=seconds)

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


class AsyncioHost:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread = threading.get_ident()

    def post(self, callback: Callable[[], Any]) -> None:
        self.loop.call_soon_threadsafe(callback)

    def make_waiter(self) -> AsyncioWaiter:
        return AsyncioWaiter(self.loop)

    def is_closed(self) -> bool:
        return self.loop.is_closed()

    def is_current(self) -> bool:
        return threading.get_ident() == self._thread and not self.loop.is_closed()


class TrioWaiter:
    __slots__ = ("_event", "_trio")

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._event = trio.Event()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._event.wait().__await__()

    async def wait_at_most(self, seconds: float) -> None:
        with self._trio.move_on_after(seconds):
            await self._event.wait()

    def wake(self) -> None:
        self._event.set()


class TrioHost:
    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()

    def post(self, callback: Callable[[], Any]) -> None:
        # trio.RunFinishedError is a RuntimeError, as a closed asyncio loop's is.
        self._token.run_sync_soon(callback)

    def make_waiter(self) -> TrioWaiter:
        return TrioWaiter(self._trio)

    def is_closed(self) -> bool:
        # A trio run can only be asked by giving it something to do.
        try:
            self._token.run_sync_soon(_nothing, idempotent=True)
        except RuntimeError:
            return True
        return False

    def is_current(self) -> bool:
        lowlevel = self._trio.lowlevel
        return lowlevel.in_trio_run() and lowlevel.current_trio_token() is self._token


def _nothing() -> None:
    return None


def running_trio() -> Any:
    """The trio module if this thread is in a trio run, else None. Another thread may be in
    the middle of importing it."""
    trio = sys.modules.get("trio")
    in_trio_run = getattr(getattr(trio, "lowlevel", None), "in_trio_run", None)
    return trio if in_trio_run is not None and in_trio_run() else None


def current_host() -> AsyncioHost | TrioHost:
    """The host of the running loop.

    Raises:
        RuntimeError: if no event loop runs in this thread.
    """
    trio = running_trio()
    if trio is not None:
        return TrioHost(trio)
    return AsyncioHost(asyncio.get_running_loop())


class LoopMailbox:
    """Wakes the readers of one loop, with at most one call into the loop outstanding."""

    def __init__(self, host: AsyncioHost | TrioHost) -> None:
        self.host = host
        self._ready: deque[Channel] = deque()
        self._posted = False

    def notify(self, channels: Iterable[Channel]) -> bool:
        self._ready.extend(channels)
        if self._posted:
            return not self.is_closed()
        self._posted = True
        try:
            self.host.post(self._drain)
        except RuntimeError:
            return False
        return True

    def is_closed(self) -> bool:
        return self.host.is_closed()

    def is_current(self) -> bool:
        return self.host.is_current()

    def _drain(self) -> None:
        # The flag goes first: what is added from here on either is seen below or posts anew.
        self._posted = False
        ready = self._ready
        while ready:
            channel = ready.popleft()
            waiter = channel.waiter
            if waiter is not None:
                waiter.wake()


class ThreadWaiter:
    """A thread that waits for its stream. It looks up now and then, because no background
    task does so on its behalf."""

    __slots__ = ("_event", "_interval", "_look_up")

    def __init__(self, interval: float, look_up: Callable[[], None]) -> None:
        self._event = threading.Event()
        self._interval = interval
        self._look_up = look_up

    def wait(self) -> None:
        if not self._event.wait(self._interval):
            self._look_up()

    def wake(self) -> None:
        self._event.set()


class ThreadMailbox:
    """Wakes threads that read streams without an event loop.

    Args:
        interval: seconds between two calls of ``look_up`` while a thread waits.
        look_up: notices a step that hangs.
    """

    def __init__(self, interval: float, look_up: Callable[[], None]) -> None:
        self._interval = interval
        self._look_up = look_up

    def make_waiter(self) -> ThreadWaiter:
        return ThreadWaiter(self._interval, self._look_up)

    def notify(self, channels: Iterable[Channel]) -> bool:
        for channel in channels:
            waiter = channel.waiter
            if waiter is not None:
                waiter.wake()
        return True

    def is_closed(self) -> bool:
        return False


class MailboxRegistry:
    """The mailbox of every loop that reads streams of one engine."""

    def __init__(self) -> None:
        self._by_loop: dict[object, LoopMailbox] = {}

    def of_running_loop(self) -> LoopMailbox:
        """The running loop's mailbox, always the same one.

        Raises:
            RuntimeError: if no event loop runs in this thread.
        """
        trio = running_trio()
        key = trio.lowlevel.current_trio_token() if trio else asyncio.get_running_loop()
        mailbox = self._by_loop.get(key)
        if mailbox is None:
            for old in [k for k, m in self._by_loop.items() if m.is_closed()]:
                self._by_loop.pop(old, None)
            mailbox = self._by_loop.setdefault(key, LoopMailbox(current_host()))
        return mailbox

    def clear(self) -> None:
        self._by_loop.clear()


def waiter_for(future: Future[Any]) -> Waiter:
    """A waiter on the running loop that ``future`` wakes when another thread completes it."""
    host = current_host()
    waiter = host.make_waiter()

    def completed(_: Future[Any]) -> None:
        try:
            host.post(waiter.wake)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    future.add_done_callback(completed)
    return waiter


async def wait_for(future: Future[Any]) -> Any:
    """Waits on the running loop for a future that another thread completes. If the wait is
    cancelled, the future is left alone."""
    await waiter_for(future)
    return future.result()
