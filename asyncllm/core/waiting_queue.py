"""WaitingQueue: waiting requests, ordered by a scheduling policy and in turns by owner."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asyncllm.core.request import Request

Rank = tuple[float, ...]

RANK_FUNCTION_BY_POLICY: Mapping[str, Callable[[Request], Rank]] = {
    "fcfs": lambda r: (),
    "priority": lambda r: (r.priority,),
    "deadline": lambda r: (r.priority, r.group.deadline),
}
"""Function that ranks a request, by policy; smaller ranks come first. Owners take turns within a
rank. The request with the largest rank, and then the latest arrival, is preempted first."""


@dataclass(slots=True, eq=False)
class _Owner:
    """The requests of one owner.

    Attributes:
        heap: ``(sort key, serial)`` of waiting requests, and of some discarded ones; the first
            entry is of a waiting request.
        num_running: number of requests that hold a slot.
        last_turn: round-robin position that the owner got at its last admission. Its later
            positions are never smaller.
        entry: its entry in the heap of owners; None while none of its requests waits.
    """

    name: str | None
    heap: list[tuple[Rank, int]] = field(default_factory=list)
    num_running: int = 0
    last_turn: int = 0
    entry: _OwnerEntry | None = None


_OwnerEntry = tuple[Rank, int, int, _Owner]
"""``(rank, place, serial, owner)``: an owner's entry in the heap of owners. The place packs the
owner's running requests, its first request's arrival and a serial into one number, because one
number is compared faster."""

_NUM_RUNNING_SHIFT, _ARRIVAL_SHIFT = 128, 64
"""Bit positions, in an entry's place, of the number of running requests and of the arrival."""


class WaitingQueue:
    """Waiting requests by rank. Within a rank, the owner with the fewest running requests is next;
    of several such owners, the one that has waited longest since its arrival or last admission.

    So while others wait, an owner gets at most its share of the slots: the slots divided by the
    number of waiting owners, rounded up. An owner's own requests are ordered by arrival, so a
    preempted request comes first.

    Heaps with lazy deletion: every operation takes O(log n). The heaps hold serials, so a discarded
    request is freed at once. An owner is known while one of its requests waits or runs.
    """

    def __init__(self, policy: str) -> None:
        self._rank_request = RANK_FUNCTION_BY_POLICY[policy]
        self._owners: dict[str | None, _Owner] = {}
        self._owner_heap: list[_OwnerEntry] = []
        self._waiting_requests: dict[Request, int] = {}
        self._request_by_serial: dict[int, Request] = {}
        self._num_entries = 0
        self._serial = 0
        self._newest_arrival_index = -1
        self._owners_set_aside: list[_Owner] = []

    def __len__(self) -> int:
        return len(self._waiting_requests)

    def __iter__(self):
        return iter(self._waiting_requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting_requests

    @property
    def num_owners(self) -> int:
        """Number of owners that have a request waiting or running."""
        return len(self._owners)

    def has_owner(self, name: str | None) -> bool:
        """Whether a request of this owner waits or runs."""
        return name in self._owners

    def push(self, request: Request) -> None:
        index = request.arrival_index
        request.sort_key = (*self._rank_request(request), index)
        if index > self._newest_arrival_index:
            self._newest_arrival_index = index
        owner = self._owners.get(request.owner)
        if owner is None:
            sole_owners = list(self._owners.values()) if len(self._owners) == 1 else ()
            owner = self._owners[request.owner] = _Owner(request.owner)
            for other in sole_owners:
                self._requeue_owner(other)
        self._serial += 1
        serial = self._waiting_requests[request] = self._serial
        self._request_by_serial[serial] = request
        self._num_entries += 1
        heapq.heappush(owner.heap, (request.sort_key, serial))
        if owner.heap[0][1] == serial:
            self._requeue_owner(owner)

    def peek(self) -> Request | None:
        """The next request to admit; None if no request waits."""
        heap = self._owner_heap
        while heap:
            entry = heap[0]
            owner = entry[3]
            if owner.entry is entry:
                return self._request_by_serial[owner.heap[0][1]]
            heapq.heappop(heap)
        return None

    def set_aside(self, name: str | None) -> None:
        """Hide an owner's requests from ``peek`` until ``restore_owners``."""
        owner = self._owners.get(name)
        if owner is not None and owner.entry is not None:
            owner.entry = None
            self._owners_set_aside.append(owner)

    def restore_owners(self) -> None:
        """Queue the owners again that were set aside."""
        for owner in self._owners_set_aside:
            self._requeue_owner(owner)
        self._owners_set_aside.clear()

    def discard(self, request: Request) -> None:
        """Remove a request from the queue; does nothing if it is not waiting."""
        if request in self._waiting_requests:
            self._drop_entry(request, self._owners[request.owner])

    def admit(self, request: Request) -> None:
        """Remove a request that gets a slot; its owner's next turn follows those of others."""
        owner = self._owners[request.owner]
        owner.num_running += 1
        self._serial += 1
        owner.last_turn = (self._newest_arrival_index << _ARRIVAL_SHIFT) + self._serial
        self._drop_entry(request, owner)

    def release(self, request: Request) -> None:
        """Record that an admitted request does not run any more."""
        owner = self._owners[request.owner]
        owner.num_running -= 1
        if owner.heap or not owner.num_running:
            self._requeue_owner(owner)

    def _drop_entry(self, request: Request, owner: _Owner) -> None:
        """Drop the entry of a request that left the queue: at once if it is the first, else
        later."""
        waiting, heap = self._request_by_serial, owner.heap
        serial = self._waiting_requests.pop(request)
        del waiting[serial]
        if heap[0][1] == serial:
            heapq.heappop(heap)
            self._num_entries -= 1
            while heap and heap[0][1] not in waiting:
                heapq.heappop(heap)
                self._num_entries -= 1
            self._requeue_owner(owner)
        if self._num_entries > 64 and self._num_entries > 4 * len(waiting):
            self._compact_heaps()

    def _requeue_owner(self, owner: _Owner) -> None:
        """Requeue an owner by its first request, or forget an owner without requests."""
        old = owner.entry
        if not owner.heap:
            owner.entry = None
            if not owner.num_running:
                del self._owners[owner.name]
            return
        if old is not None and len(self._owners) == 1:
            # A sole owner's entry needs no update: ``push`` renews it when a second owner comes.
            return
        heap = self._owner_heap
        sort_key = owner.heap[0][0]
        turn = self._request_by_serial[owner.heap[0][1]].arrival_index << _ARRIVAL_SHIFT
        if turn < owner.last_turn:
            turn = owner.last_turn
        self._serial += 1
        place = (owner.num_running << _NUM_RUNNING_SHIFT) + turn
        owner.entry = entry = (sort_key[:-1], place, self._serial, owner)
        if heap and heap[0] is old:
            heapq.heapreplace(heap, entry)
            return
        heapq.heappush(heap, entry)
        if len(heap) > 64 and len(heap) > 4 * len(self._owners):
            self._owner_heap = [entry for entry in heap if entry[3].entry is entry]
            heapq.heapify(self._owner_heap)

    def _compact_heaps(self) -> None:
        """Drop the entries of discarded requests."""
        waiting = self._request_by_serial
        self._num_entries = len(waiting)
        for owner in self._owners.values():
            # The first entry is a waiting request: it stays first, so ``owner.entry`` stays valid.
            owner.heap = [entry for entry in owner.heap if entry[1] in waiting]
            heapq.heapify(owner.heap)
