"""WaitingQueue: requests that wait, in the order of a scheduling policy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from asyncllm.core.request import Request

SortKey = Callable[[Request], tuple[float, ...]]

POLICIES: Mapping[str, SortKey] = {
    "fcfs": lambda r: (r.arrival_index,),
    "priority": lambda r: (r.priority, r.arrival_index),
    "deadline": lambda r: (r.priority, r.group.deadline, r.arrival_index),
}
"""Sort key of requests by policy; smaller ones come first. The request with the largest key is
preempted first."""


class WaitingQueue:
    """Heap with lazy deletion: push and pop take O(log n), discard O(1)."""

    def __init__(self, policy: str) -> None:
        self._key = POLICIES[policy]
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []
        self._members: dict[Request, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self):
        return iter(self._members)

    def push(self, request: Request) -> None:
        request.sort_key = self._key(request)
        self._serial += 1
        self._members[request] = self._serial
        heapq.heappush(self._heap, (request.sort_key, self._serial, request))

    def peek(self) -> Request | None:
        heap, members = self._heap, self._members
        while heap:
            _, serial, request = heap[0]
            if members.get(request) == serial:
                return request
            heapq.heappop(heap)
        return None

    def discard(self, request: Request) -> None:
        if self._members.pop(request, None) is None:
            return
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._members):
            self._heap = [e for e in self._heap if self._members.get(e[2]) == e[1]]
            heapq.heapify(self._heap)
