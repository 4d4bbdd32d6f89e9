"""Admission: the accepted requests, and the limits of the queue.

A lock protects the registry, which submitting threads and the engine thread share. Aborts and
destructors take no lock: they set the group's ``cancelled`` flag, which frees the group's id at
once, and send a command to the engine thread. A group has one id, and each of its members has a
place in the queue.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncllm import validation as check
from asyncllm.core.caller_queue import CallerQueue
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.waiting_texts import WaitingTexts
from asyncllm.errors import AsyncLLMError, EngineOverloadedError, InvalidRequestError

_RATE_HALF_LIFE_SECONDS = 5.0
_MAX_RETRY_SECONDS = 60.0


class Admission:
    """Registry of live requests by id, and the limits of the waiting queue.

    An owner that is alone may fill the queue. If k owners have queued requests, each of them may
    queue up to 1/k of the limits, rounded up, even if the queue is full; the queue never holds more
    than twice its limits.

    Args:
        max_queued_requests: requests that may wait for their first step.
        max_queued_tokens: prompt tokens that may wait.
        clock: function that returns monotonic time in seconds.

    Attributes:
        queued_requests: map from each queued request to its number of prompt tokens, an estimate
            until its text is tokenised.
        num_queued_tokens: sum of these numbers.
        waiting_texts: memory of the queued groups' long texts.
        caller_queue: callers that wait until this queue has a place for them.
        caller_queues: all CallerQueues whose callers may get a place in this queue, in the order in
            which they are served: ``caller_queue``, and the EngineGroup's. The tuple is replaced,
            never changed.
    """

    def __init__(
        self, max_queued_requests: int, max_queued_tokens: int, clock: Callable[[], float]
    ) -> None:
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._live_groups: dict[str, RequestGroup] = {}
        self._replaced_groups: set[RequestGroup] = set()
        self._num_members = 0
        self._ended_members: set[Request] = set()
        self._next_arrival_index = 0
        self.queued_requests: dict[Request, int] = {}
        self.num_queued_tokens = 0
        self.waiting_texts = WaitingTexts()
        self._queued_counts_by_owner: dict[str | None, list[int]] = {}
        self.caller_queue = CallerQueue(self.waiting_texts.has_room)
        self.caller_queues: tuple[CallerQueue, ...] = (self.caller_queue,)
        self._closed_error: Callable[[], AsyncLLMError] | None = None
        self._drain_rate = 0.0
        self._drain_rate_at = clock()
        self.num_requests = 0
        self.num_rejected = 0

    @property
    def num_live_requests(self) -> int:
        """Number of requests that have not ended."""
        return self._num_members - len(self._ended_members)

    def get_live_group(self, request_id: str) -> RequestGroup | None:
        group = self._live_groups.get(request_id)
        return None if group is None or group.cancelled else group

    def check_id(self, request_id: str) -> None:
        """Raise InvalidRequestError if a live request has this id."""
        if self.get_live_group(request_id) is not None:
            raise InvalidRequestError(
                f"request_id={request_id!r}: a live request has this id; "
                "expected one that is not in use",
                param="request_id",
            )

    def reserve(
        self, group: RequestGroup, num_tokens: int, num_caller_queues_ahead: int | None = None
    ) -> None:
        """Register a group: give each member a place in the queue and an arrival index.

        Args:
            num_tokens: tokens of the prompt, or an estimate until it is tokenised.
            num_caller_queues_ahead: how many of the ``caller_queues``, in order, are served before
                the group; None means all. A group at the head of a CallerQueue passes the index of
                that CallerQueue.

        Raises:
            EngineOverloadedError: if the queue is full.
            InvalidRequestError: if a live request has this id, or the queue is too short for
                the group even when it is empty.
            EngineError: after ``close(error)``, the result of ``error()``.
        """
        with self._lock:
            shortage = self._admit(group, num_tokens, num_caller_queues_ahead)
            self._raise_if_full(shortage, num_caller_queues_ahead)

    def check(
        self, group: RequestGroup, num_tokens: int, num_caller_queues_ahead: int | None = None
    ) -> None:
        """Check that the queue would take a group, without registering it. Arguments and errors are
        those of ``reserve``. The members of a refused group need not be made."""
        with self._lock:
            shortage = self._check_group(group, num_tokens, num_caller_queues_ahead)
            self._raise_if_full(shortage, num_caller_queues_ahead)

    def _raise_if_full(
        self, shortage: tuple[str, int] | None, num_caller_queues_ahead: int | None
    ) -> None:
        """Raise EngineOverloadedError for a ``shortage``, the result of ``_find_shortage``."""
        if shortage is not None:
            self.num_rejected += num_caller_queues_ahead is None
            reason, num_requests_ahead = shortage
            retry_after = self._retry_after(num_requests_ahead)
            message = f"{reason}; try again in {retry_after:.2f} s"
            raise EngineOverloadedError(message, retry_after=retry_after)

    def retry_after(
        self, group: RequestGroup, num_tokens: int, num_caller_queues_ahead: int | None = None
    ) -> float:
        """Seconds until the queue is likely to have room for a group; 0.0 if it has room now."""
        with self._lock:
            shortage = self._find_shortage(group, num_tokens, num_caller_queues_ahead)
            return 0.0 if shortage is None else self._retry_after(shortage[1])

    def reserve_or_wait(
        self, group: RequestGroup, num_tokens: int, is_gone: Callable[[], bool]
    ) -> Future[Any] | None:
        """Reserve places for a group; if the queue is full, wait for them in ``caller_queue``.

        Args:
            is_gone: function that tells whether the caller has stopped waiting; called on any
                thread.

        Returns:
            None if the group has its place in the queue; else a future that is done when the group
            has one. Owners with waiting groups get free places in turns, and ``reserve`` fails
            while groups wait. ``EngineCore.abort`` ends the wait; if the group has no place then,
            its ``members`` are emptied.

        Raises:
            InvalidRequestError, EngineError: as ``reserve``; the future fails with them too.
        """
        with self.caller_queue.lock, self._lock:
            if self._admit(group, num_tokens) is None:
                return None
            return self.caller_queue.push(
                group, partial(self._reserve_for_first_caller, group, num_tokens), is_gone
            )

    def _reserve_for_first_caller(self, group: RequestGroup, num_tokens: int) -> bool:
        """Register the first waiting group; False if the queue is full."""
        with self._lock:
            return self._admit(group, num_tokens, 0) is None

    def _advance_caller_queues(self) -> None:
        for queue in self.caller_queues:
            queue.advance()

    def _find_shortage(
        self, group: RequestGroup, num_tokens: int, num_caller_queues_ahead: int | None = None
    ) -> tuple[str, int] | None:
        """Reason why a group cannot be queued now, as ``_check_room`` returns it; else None.

        A group can be queued if the queue has room and no other group waits before it. It can also
        be queued if it fits its owner's share of the queue and no group of its owner waits before
        it.

        Args:
            num_caller_queues_ahead: as for ``reserve``.
        """
        queues_ahead = self.caller_queues[:num_caller_queues_ahead]
        num_waiting = sum([queue.num_ahead_of(group) for queue in queues_ahead])
        if num_waiting:
            shortage = f"{num_waiting} wait for a place in the queue", num_waiting
        else:
            shortage = self._check_room(group.num_members, num_tokens)
        if not self.waiting_texts.has_room(group):
            return f"{self.waiting_texts.num_bytes} bytes of long texts are queued", 1
        if shortage is None:
            return None
        waits = any(queue.has_owner_ahead_of(group) for queue in queues_ahead)
        return None if not waits and self._fits_owner_share(group, num_tokens) else shortage

    def _check_group(
        self, group: RequestGroup, num_tokens: int, num_caller_queues_ahead: int | None
    ) -> tuple[str, int] | None:
        """Check a group's id and size; returns its shortage of room as ``_find_shortage`` does.

        Raises:
            AsyncLLMError: if the group is refused even by an empty queue.
        """
        if self._closed_error is not None:
            raise self._closed_error()
        if group.request_id in self._live_groups:
            self.check_id(group.request_id)
        if group.num_members > self.max_queued_requests:
            accepted = f"at most max_queued_requests={self.max_queued_requests}"
            raise check.value_error("n", group.num_members, accepted)
        return self._find_shortage(group, num_tokens, num_caller_queues_ahead)

    def _admit(
        self, group: RequestGroup, num_tokens: int, num_caller_queues_ahead: int | None = None
    ) -> tuple[str, int] | None:
        """Register a group if the queue has room for it; returns the result of ``_find_shortage``,
        and raises as ``_check_group``."""
        shortage = self._check_group(group, num_tokens, num_caller_queues_ahead)
        if shortage is not None:
            return shortage
        members = group.members
        count, owner = len(members), members[0].owner
        earlier = self._live_groups.get(group.request_id)
        if earlier is not None:
            # An aborted group frees its id at once, but the engine thread will still call
            # ``forget_group`` for it.
            self._replaced_groups.add(earlier)
        self._live_groups[group.request_id] = group
        self._num_members += count
        self._count_queued(owner, count, count * num_tokens)
        self.waiting_texts.add(group)
        for i, request in enumerate(members, self._next_arrival_index):
            self.queued_requests[request] = num_tokens
            request.arrival_index = i
        self._next_arrival_index += count
        self.num_requests += 1
        return None

    def _count_queued(self, owner: str | None, num_requests: int, num_tokens: int) -> None:
        """Add to an owner's counts of queued requests and of queued prompt tokens."""
        self.num_queued_tokens += num_tokens
        queued = self._queued_counts_by_owner.setdefault(owner, [0, 0])
        queued[0] += num_requests
        queued[1] += num_tokens
        if not queued[0]:
            del self._queued_counts_by_owner[owner]

    def _fits_owner_share(self, group: RequestGroup, num_tokens: int) -> bool:
        """Whether a full queue may still take a group, because its owner holds less than its share,
        or nothing: a group larger than a share would else hold up all that wait behind it. The
        queue may then grow to twice its limits. False if no other owner uses the queue."""
        owner, num_requests = group.members[0].owner, group.num_members
        num_tokens *= num_requests
        num_owners = len(self._queued_counts_by_owner) + (owner not in self._queued_counts_by_owner)
        counted_tokens = min(num_tokens, self.max_queued_tokens)
        if (
            num_owners == 1
            or len(self.queued_requests) + num_requests > 2 * self.max_queued_requests
            or self.num_queued_tokens + counted_tokens > 2 * self.max_queued_tokens
        ):
            return False
        num_queued, num_queued_tokens = self._queued_counts_by_owner.get(owner, (0, 0))
        return not num_queued or (
            num_queued + num_requests <= math.ceil(self.max_queued_requests / num_owners)
            and num_queued_tokens + num_tokens <= math.ceil(self.max_queued_tokens / num_owners)
        )

    def _check_room(self, num_requests: int, num_tokens: int) -> tuple[str, int] | None:
        """Reason why a group does not fit the queue: a message, and how many requests have to leave
        first. None if it fits.

        Args:
            num_tokens: number of prompt tokens of each of the ``num_requests`` requests.
        """
        requests, tokens = len(self.queued_requests), self.num_queued_tokens
        num_tokens *= num_requests
        if requests + num_requests > self.max_queued_requests:
            reason = (
                f"{requests} requests are queued, max_queued_requests={self.max_queued_requests}"
            )
            return reason, requests + num_requests - self.max_queued_requests
        if self.queued_requests and tokens + num_tokens > self.max_queued_tokens:
            reason = (
                f"{tokens} prompt tokens are queued and {num_tokens} more do not fit into "
                f"max_queued_tokens={self.max_queued_tokens}"
            )
            excess = tokens + num_tokens - self.max_queued_tokens
            return reason, max(1, round(requests * excess / max(tokens, 1)))
        return None

    def _retry_after(self, num_requests_ahead: int) -> float:
        if self._drain_rate == 0.0:
            return 1.0  # The drain rate has not been measured yet.
        rate = self._drain_rate * 0.5 ** (
            (self._clock() - self._drain_rate_at) / _RATE_HALF_LIFE_SECONDS
        )
        if rate * _MAX_RETRY_SECONDS <= num_requests_ahead:
            return _MAX_RETRY_SECONDS
        return max(num_requests_ahead / rate, 0.01)

    def correct_estimate(self, group: RequestGroup, num_tokens: int) -> None:
        """Replace the estimate of a prompt's length once it is tokenised."""
        with self._lock:
            for request in group.members:
                if request in self.queued_requests:
                    self._count_queued(request.owner, 0, num_tokens - self.queued_requests[request])
                    self.queued_requests[request] = num_tokens
            self.waiting_texts.remove_prompt(group)
            group.num_text_bytes = 0
        self._advance_caller_queues()

    def remove_from_queue(self, requests: Sequence[Request]) -> None:
        """Remove requests of any groups from the queue, because they were scheduled for the first
        time."""
        with self._lock:
            any_removed = self._remove_queued(requests)
        if any_removed:
            self._advance_caller_queues()

    def mark_members_ended(self, members: Sequence[Request]) -> None:
        """Count members as ended while other members of their group go on."""
        with self._lock:
            any_removed = self._remove_queued(members)
            self._ended_members.update(members)
        if any_removed:
            self._advance_caller_queues()

    def forget_group(self, group: RequestGroup) -> None:
        """Remove a group that has ended, and free its id unless a later group already uses it."""
        with self._lock:
            any_removed = self._remove_queued(group.members)
            is_newest = self._live_groups.get(group.request_id) is group
            if is_newest:
                del self._live_groups[group.request_id]
            if is_newest or group in self._replaced_groups:
                self._replaced_groups.discard(group)
                self._num_members -= len(group.members)
                self._ended_members.difference_update(group.members)
        if any_removed:
            self._advance_caller_queues()

    def _remove_queued(self, requests: Sequence[Request]) -> bool:
        """Remove those of the requests that are queued; returns whether any was. Updates the rate
        at which the queue drains, an exponential average with a half-life of 5 s. The caller holds
        the lock, and advances the caller queues afterwards."""
        num_removed = 0
        for request in requests:
            num_tokens = self.queued_requests.pop(request, None)
            if num_tokens is not None:
                num_removed += 1
                self.waiting_texts.remove(request.group)
                self._count_queued(request.owner, -1, -num_tokens)
        if num_removed:
            now = self._clock()
            decay = 0.5 ** ((now - self._drain_rate_at) / _RATE_HALF_LIFE_SECONDS)
            added = num_removed * 0.6931 / _RATE_HALF_LIFE_SECONDS
            self._drain_rate = self._drain_rate * decay + added
            self._drain_rate_at = now
        return num_removed > 0

    def close(self, error: Callable[[], AsyncLLMError]) -> list[RequestGroup]:
        """Refuse new groups: from now on ``reserve`` raises ``error()``, and waiting callers fail
        with it. Returns every group that has not ended, including aborted ones."""
        with self._lock:
            self._closed_error = error
            live = [*self._live_groups.values(), *self._replaced_groups]
        self.caller_queue.fail_all(error)
        self._advance_caller_queues()  # Calls to an EngineGroup may have waited for this engine.
        return live
