"""CallerQueue: callers that wait because the queue of requests is full."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from asyncllm.core.request import RequestGroup
from asyncllm.core.waiting_queue import WaitingQueue
from asyncllm.errors import AsyncLLMError


@dataclass(slots=True, eq=False)
class _Waiter:
    """Group that waits for a place.

    Attributes:
        try_reserve: function that gives the group a place; its result is false if the queue is
            full.
        is_gone: function that tells whether the caller has stopped waiting.
        place_future: future of the result of ``try_reserve``, or of its error.
    """

    try_reserve: Callable[[], Any]
    is_gone: Callable[[], bool]
    place_future: Future[Any] = field(default_factory=Future)


class CallerQueue:
    """Queue of request groups that wait for a place in the queue of one engine, or of any engine of
    an EngineGroup. Each owner (``Request.owner``) that has waiting groups gets a place in turn.

    Attributes:
        lock: held while a group gets its place. It is taken before the lock of an Admission.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiters: dict[RequestGroup, _Waiter] = {}
        self._waiting_queue = WaitingQueue("fcfs")
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def has_owner(self, name: str | None) -> bool:
        """Whether a group of this owner waits."""
        return self._waiting_queue.has_owner(name)

    def push(
        self, group: RequestGroup, try_reserve: Callable[[], Any], is_gone: Callable[[], bool]
    ) -> Future[Any]:
        """Put a group behind its owner's waiting groups. The caller holds ``lock``.

        Args:
            try_reserve: function that gives the group its place if the queue has room. A true
                result means that the group has a place. Called on any thread, with ``lock`` held.
            is_gone: function that tells whether the caller has stopped waiting; called on any
                thread.

        Returns:
            Future of the result of ``try_reserve``, or of the AsyncLLMError that it raises. If the
            group leaves this queue without a place, its ``members`` are emptied.
        """
        waiter = self._waiters[group] = _Waiter(try_reserve, is_gone)
        self._num_pushed += 1
        group.members[0].arrival_index = self._num_pushed
        self._waiting_queue.push(group.members[0])
        return waiter.place_future

    def withdraw(self, group: RequestGroup) -> None:
        """Remove a group if it waits. Groups behind it may then fit."""
        if group in self._waiters:
            with self.lock:
                if self._waiters.pop(group, None) is not None:
                    self._waiting_queue.discard(group.members[0])
                    group.members = []
            self.advance()

    def advance(self) -> None:
        """Give waiting groups places, in turns by owner, until the queue is full. To be called
        whenever a place becomes free. The caller must hold no lock, because this runs callbacks of
        the groups' futures."""
        while self._waiters:
            with self.lock:
                first = self._waiting_queue.peek()
                if first is None:
                    return
                group = first.group
                waiter, place, error = self._waiters[group], None, None
                if group.cancelled or waiter.is_gone():
                    group.members = []
                else:
                    try:
                        place = waiter.try_reserve()
                        if not place:
                            return
                    except AsyncLLMError as failure:
                        error, group.members = failure, []
                del self._waiters[group]
                self._waiting_queue.admit(first)
                self._waiting_queue.release(first)
            if error is None:
                waiter.place_future.set_result(place)
            else:
                waiter.place_future.set_exception(error)

    def fail_all(self, error: Callable[[], AsyncLLMError]) -> None:
        """Fail all waiting groups."""
        with self.lock:
            waiters, self._waiters = self._waiters, {}
            self._waiting_queue = WaitingQueue("fcfs")
        for group, waiter in waiters.items():
            group.members = []
            waiter.place_future.set_exception(error())
