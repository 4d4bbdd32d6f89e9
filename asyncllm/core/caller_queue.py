"""CallerQueue: callers that wait because the queue of requests is full."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from asyncllm.core.request import RequestGroup
from asyncllm.core.waiting_queue import WaitingQueue
from asyncllm.core.waiting_texts import has_long_texts
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

    Groups whose texts find no room wait in a second line, and groups without long texts pass them.
    Groups with long texts that come later join that line. Its first group returns to the queue once
    its texts have room.

    Args:
        has_text_room: function that tells whether there is room for the texts of a group; called on
            any thread.

    Attributes:
        lock: held while a group gets its place. It is taken before the lock of an Admission.
    """

    def __init__(self, has_text_room: Callable[[RequestGroup], bool]) -> None:
        self.lock = threading.Lock()
        self._has_text_room = has_text_room
        self._waiters: dict[RequestGroup, _Waiter] = {}
        self._waiting_queue = WaitingQueue("fcfs")
        self._text_queue = WaitingQueue("fcfs")
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def num_ahead_of(self, group: RequestGroup) -> int:
        """Number of waiting groups that come before a new group."""
        return len(self._waiters if has_long_texts(group) else self._waiting_queue)

    def has_owner_ahead_of(self, group: RequestGroup) -> bool:
        """Whether a group of the same owner comes before a new group."""
        owner = group.members[0].owner
        return self._waiting_queue.has_owner(owner) or (
            has_long_texts(group) and self._text_queue.has_owner(owner)
        )

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
        waits_for_room = has_long_texts(group) and (
            len(self._text_queue) > 0 or not self._has_text_room(group)
        )
        (self._text_queue if waits_for_room else self._waiting_queue).push(group.members[0])
        return waiter.place_future

    def withdraw(self, group: RequestGroup) -> None:
        """Remove a group if it waits. Groups behind it may then fit."""
        if group in self._waiters:
            with self.lock:
                if self._waiters.pop(group, None) is not None:
                    self._waiting_queue.discard(group.members[0])
                    self._text_queue.discard(group.members[0])
                    group.members = []
            self.advance()

    def advance(self) -> None:
        """Give waiting groups places, in turns by owner, until the queue is full. To be called
        whenever a place becomes free. The caller must hold no lock, because this runs callbacks of
        the groups' futures."""
        while self._waiters:
            with self.lock:
                self._return_text_waiter()
                first = self._waiting_queue.peek()
                if first is None:
                    return
                group = first.group
                waiter, place, error = self._waiters[group], None, None
                if self._has_left(group):
                    group.members = []
                elif has_long_texts(group) and not self._has_text_room(group):
                    self._waiting_queue.discard(first)
                    self._text_queue.push(first)
                    continue
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

    def _return_text_waiter(self) -> None:
        """Move the first group of the second line back to the queue if its texts have room."""
        first = self._text_queue.peek()
        if first is not None and (self._has_left(first.group) or self._has_text_room(first.group)):
            self._text_queue.admit(first)
            self._text_queue.release(first)
            self._waiting_queue.push(first)

    def _has_left(self, group: RequestGroup) -> bool:
        """Whether a waiting group was aborted, or its caller has stopped waiting."""
        return group.cancelled or self._waiters[group].is_gone()

    def fail_all(self, error: Callable[[], AsyncLLMError]) -> None:
        """Fail all waiting groups."""
        with self.lock:
            waiters, self._waiters = self._waiters, {}
            self._waiting_queue, self._text_queue = WaitingQueue("fcfs"), WaitingQueue("fcfs")
        for group, waiter in waiters.items():
            group.members = []
            waiter.place_future.set_exception(error())
