"""Mailboxes, through which the engine thread wakes the readers of streams."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncllm.core.channel import Channel
from asyncllm.runtime.event_loop import EventLoopBackend, running_backend, running_loop


class LoopMailbox:
    """Wakes the readers on one event loop; at most one ``post`` to the loop is pending."""

    def __init__(self, backend: EventLoopBackend) -> None:
        self.backend = backend
        self.is_closed = backend.is_closed
        self._channels_to_wake: deque[Channel] = deque()
        self._is_call_pending = False

    def notify(self, channels: Iterable[Channel]) -> bool:
        self._channels_to_wake.extend(channels)
        if self._is_call_pending:
            return not self.is_closed()
        self._is_call_pending = True
        try:
            self.backend.post(self._wake_readers)
        except RuntimeError:
            return False
        return True

    def _wake_readers(self) -> None:
        # Clear the flag first: a channel that is added later is either found below, or posts a new
        # call.
        self._is_call_pending = False
        ready = self._channels_to_wake
        while ready:
            waiter = ready.popleft().waiter
            # The waiter may already have been woken or cancelled.
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


@dataclass(slots=True, eq=False)
class ThreadMailbox:
    """Wakes threads that read streams without an event loop.

    Args:
        interval: seconds between two calls of ``watchdog`` while a thread waits.
        watchdog: function that checks for a step that hangs.
    """

    interval: float
    watchdog: Callable[[], None]

    def wait(self, waiter: threading.Event) -> None:
        """Wait until ``waiter`` is set, for at most ``interval`` seconds. After a timeout, call the
        watchdog: without an event loop, no background task calls it."""
        if not waiter.wait(self.interval):
            self.watchdog()

    def notify(self, channels: Iterable[Channel]) -> bool:
        for channel in channels:
            waiter = channel.waiter
            if waiter is not None:
                waiter.set()
        return True

    def is_closed(self) -> bool:
        return False


class MailboxRegistry:
    """The mailboxes of all event loops that read streams of one engine."""

    def __init__(self) -> None:
        self._mailbox_by_loop: dict[object, LoopMailbox] = {}

    def of_running_loop(self) -> LoopMailbox:
        """Mailbox of the running event loop; always the same object.

        Raises:
            RuntimeError: if no event loop runs in this thread.
        """
        key = running_loop()
        mailbox = self._mailbox_by_loop.get(key)
        if mailbox is None:
            # Iterate over a copy, because other threads add and remove loops meanwhile; copying a
            # dict is atomic.
            for old in [k for k, m in self._mailbox_by_loop.copy().items() if m.is_closed()]:
                self._mailbox_by_loop.pop(old, None)
            mailbox = self._mailbox_by_loop.setdefault(key, LoopMailbox(running_backend()))
        return mailbox

    def clear(self) -> None:
        self._mailbox_by_loop.clear()
