"""Admission: the accepted requests, and the limits of the queue.

Threads that submit and the engine thread share it behind a lock. Aborts and destructors take no
lock: they set the group's ``cancelled`` flag, which frees its id at once, and send a command to the
engine thread. An id belongs to a group, a place in the queue to each of its members.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from asyncllm import validation as check
from asyncllm.core.request import Request, RequestGroup
from asyncllm.errors import AsyncLLMError, EngineOverloadedError, InvalidRequestError

_RATE_HALF_LIFE = 5.0
_MAX_RETRY_AFTER = 60.0


class Admission:
    """Registry of live requests by id, and the limits of the waiting queue.

    Args:
        max_queued_requests: requests that may wait for their first step.
        max_queued_tokens: prompt tokens that may wait.
        clock: seconds, monotonic.
    """

    def __init__(
        self, max_queued_requests: int, max_queued_tokens: int, clock: Callable[[], float]
    ) -> None:
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[str, RequestGroup] = {}
        self._replaced: set[RequestGroup] = set()
        self._num_members = 0
        self._ended: set[Request] = set()
        self._num_arrived = 0
        self._queued: dict[Request, int] = {}
        self._queued_tokens = 0
        self._closed: Callable[[], AsyncLLMError] | None = None
        self._rate = 0.0
        self._rate_at = clock()
        self.num_requests = 0
        self.num_rejected = 0

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._num_members - len(self._ended)

    def get(self, request_id: str) -> RequestGroup | None:
        group = self._live.get(request_id)
        return None if group is None or group.cancelled else group

    def reserve(self, group: RequestGroup, num_tokens: int) -> None:
        """Register a group: a place in the queue and an arrival index for each member.

        Args:
            num_tokens: tokens of the prompt, or an estimate until it is tokenised.

        Raises:
            EngineOverloadedError: if the queue is full.
            InvalidRequestError: if a live request has this id, or the queue is too short for
                the group even when it is empty.
            EngineError: after ``close``, the error that it was given.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            other = self._live.get(group.request_id)
            if other is not None and not other.cancelled:
                raise InvalidRequestError(
                    f"request_id={group.request_id!r}: a live request has this id; "
                    "expected one that is not in use",
                    param="request_id",
                )
            members = group.members
            count = len(members)
            self._check_room(count, count * num_tokens)
            if other is not None:
                # Aborted, but still known to the engine thread: ``forget`` will come for it.
                self._replaced.add(other)
            self._live[group.request_id] = group
            self._num_members += count
            self._queued_tokens += count * num_tokens
            for i, request in enumerate(members, self._num_arrived):
                self._queued[request] = num_tokens
                request.arrival_index = i
            self._num_arrived += count
            self.num_requests += 1

    def _check_room(self, num_requests: int, num_tokens: int) -> None:
        if num_requests > self.max_queued_requests:
            accepted = f"at most max_queued_requests={self.max_queued_requests}"
            raise check.invalid("n", num_requests, accepted)
        requests, tokens = len(self._queued), self._queued_tokens
        if requests + num_requests > self.max_queued_requests:
            what = f"{requests} requests are queued, max_queued_requests={self.max_queued_requests}"
            surplus = requests + num_requests - self.max_queued_requests
        elif self._queued and tokens + num_tokens > self.max_queued_tokens:
            what = (
                f"{tokens} prompt tokens are queued and {num_tokens} more do not fit into "
                f"max_queued_tokens={self.max_queued_tokens}"
            )
            excess = tokens + num_tokens - self.max_queued_tokens
            surplus = max(1, round(requests * excess / max(tokens, 1)))
        else:
            return
        self.num_rejected += 1
        retry_after = self._retry_after(surplus)
        raise EngineOverloadedError(
            f"{what}; try again in {retry_after:.2f} s", retry_after=retry_after
        )

    def _retry_after(self, surplus: int) -> float:
        if self._rate == 0.0:
            return 1.0  # nothing was measured yet
        rate = self._rate * 0.5 ** ((self._clock() - self._rate_at) / _RATE_HALF_LIFE)
        if rate * _MAX_RETRY_AFTER <= surplus:
            return _MAX_RETRY_AFTER
        return max(surplus / rate, 0.01)

    def correct_estimate(self, group: RequestGroup, num_tokens: int) -> None:
        """Replace the estimate of a prompt's length once it is tokenised."""
        with self._lock:
            for request in group.members:
                if request in self._queued:
                    self._queued_tokens += num_tokens - self._queued[request]
                    self._queued[request] = num_tokens

    def leave_queue(self, request: Request) -> None:
        """Remove a request from the queue: first scheduled, or ended before that. Updates the rate
        at which the queue drains, an exponential average with a half-life of 5 s."""
        with self._lock:
            num_tokens = self._queued.pop(request, None)
            if num_tokens is None:
                return
            self._queued_tokens -= num_tokens
            now = self._clock()
            decay = 0.5 ** ((now - self._rate_at) / _RATE_HALF_LIFE)
            self._rate = self._rate * decay + 0.6931 / _RATE_HALF_LIFE
            self._rate_at = now

    def leave(self, request: Request) -> None:
        """Count a request as ended while its group goes on."""
        self.leave_queue(request)
        with self._lock:
            self._ended.add(request)

    def forget(self, group: RequestGroup) -> None:
        """Remove a group that has ended. Frees its id, unless a later group has it already."""
        for request in group.members:
            self.leave_queue(request)
        with self._lock:
            if self._live.get(group.request_id) is group:
                del self._live[group.request_id]
            elif group in self._replaced:
                self._replaced.remove(group)
            else:
                return
            self._num_members -= len(group.members)
            self._ended.difference_update(group.members)

    def close(self, error: Callable[[], AsyncLLMError]) -> list[RequestGroup]:
        """Refuse new groups: ``reserve`` raises ``error()`` from now on. Returns every group that
        has not ended, aborted ones included."""
        with self._lock:
            self._closed = error
            return [*self._live.values(), *self._replaced]
