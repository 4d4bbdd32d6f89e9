"""Deadlines: request groups in the order in which they expire, and the error that ends them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from asyncllm.core.request import RequestGroup
from asyncllm.errors import RequestError
from asyncllm.outputs import Completion


class DeadlineExceededError(RequestError, TimeoutError):
    """The request's ``timeout`` passed.

    Attributes:
        partial: the output before the deadline, or None if there was none.
    """

    def __init__(self, message: str, *, partial: Completion | None = None) -> None:
        super().__init__(message)
        self.partial = partial


class Deadlines:
    """Heap of request groups that have a deadline. Groups that have ended stay in it until they
    reach the top, or make up most of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestGroup]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def earliest(self) -> float:
        """The earliest deadline in seconds of the clock; infinity if no group has one."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, group: RequestGroup, num_live_requests: int) -> None:
        """Add a request group that has a deadline.

        Args:
            num_live_requests: number of the engine's requests that have not ended.
        """
        heap = self._heap
        if len(heap) > 64 and len(heap) > 4 * num_live_requests:
            # Most groups in the heap have ended. Drop them now, because each keeps its prompts
            # alive.
            heap[:] = [entry for entry in heap if entry[2].unfinished_requests]
            heapq.heapify(heap)
        heapq.heappush(heap, (group.deadline, group.members[0].arrival_index, group))

    def expire(self, now: float) -> Iterator[RequestGroup]:
        """Remove the groups whose deadline has passed; yield those of them that have not ended."""
        heap = self._heap
        while heap and (heap[0][0] <= now or not heap[0][2].unfinished_requests):
            group = heapq.heappop(heap)[2]
            if group.unfinished_requests:
                yield group
