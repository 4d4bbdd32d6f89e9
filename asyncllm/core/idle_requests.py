"""IdleRequests: requests that hold blocks without running, in order of preemption."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from asyncllm.core.request import Request, Status


class _Entry(NamedTuple):
    """Entry of the heap; the serial keeps equal entries from comparing their requests."""

    is_resumed: bool
    descending_key: tuple[float, ...]
    serial: int
    request: Request


class IdleRequests:
    """Requests that hold blocks without running: paused ones, and resumed ones that wait.

    A heap with lazy deletion: every operation takes O(log n), because thousands of streams may be
    paused while requests are admitted.

    Attributes:
        entries: entry of each request. Removing it removes the request.
    """

    def __init__(self) -> None:
        self.entries: dict[Request, _Entry] = {}
        self._heap: list[_Entry] = []
        self._serial = 0

    def add(self, request: Request) -> None:
        """Add a request, or place it anew after its status has changed."""
        self._serial += 1
        descending_key = tuple([-part for part in request.sort_key])
        is_resumed = request.status is not Status.PAUSED
        entry = self.entries[request] = _Entry(is_resumed, descending_key, self._serial, request)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self.entries):
            self._heap = list(self.entries.values())
            heapq.heapify(self._heap)

    def next_victim(self) -> Request | None:
        """The request to preempt next: a paused one if there is one, of these the last by sort key.
        None if there is none."""
        while self._heap:
            first = self._heap[0]
            if self.entries.get(first.request) is first:
                return first.request
            heapq.heappop(self._heap)
        return None
