"""Admission: which requests the engine has accepted, and how many more it takes.

This is the one place that several threads share behind a lock: submission from any loop,
and the engine thread. Aborts and destructors never come here; they set the request's
``cancelled`` flag, which frees its id at once, and put a command into the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from asyncllm.core.request import Request
from asyncllm.errors import AsyncLLMError, EngineOverloadedError, InvalidRequestError

_RATE_HALF_LIFE = 5.0
_MAX_RETRY_AFTER = 60.0


class Admission:
    """Counts what is queued and knows every live request by its id.

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
        self._live: dict[str, Request] = {}
        self._replaced: set[Request] = set()
        self._queued: dict[Request, int] = {}
        self._queued_tokens = 0
        self._next_arrival_index = 0
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
        return len(self._live) + len(self._replaced)

    def get(self, request_id: str) -> Request | None:
        request = self._live.get(request_id)
        return None if request is None or request.cancelled else request

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Takes a place in the queue for ``request`` and gives it its rank.

        Args:
            num_tokens: tokens of the prompt, or an estimate until it is tokenised.

        Raises:
            EngineOverloadedError: if the queue is full.
            InvalidRequestError: if a live request has this id.
            EngineError: once the engine takes no more, whatever ``close`` was given.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            other = self._live.get(request.request_id)
            if other is not None and not other.cancelled:
                raise InvalidRequestError(
                    f"request_id={request.request_id!r}: a live request has this id; "
                    "expected one that is not in use",
                    param="request_id",
                )
            self._check_room(num_tokens)
            if other is not None:
                # Aborted, but the engine thread has yet to hear of it.
                self._replaced.add(other)
            self._live[request.request_id] = request
            self._queued[request] = num_tokens
            self._queued_tokens += num_tokens
            request.arrival_index = self._next_arrival_index
            self._next_arrival_index += 1
            self.num_requests += 1

    def _check_room(self, num_tokens: int) -> None:
        requests, tokens = len(self._queued), self._queued_tokens
        if requests >= self.max_queued_requests:
            what = f"{requests} requests are queued, max_queued_requests={self.max_queued_requests}"
            surplus = requests - self.max_queued_requests + 1
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

    def correct(self, request: Request, num_tokens: int) -> None:
        """Replaces the estimate of a prompt's length once it is tokenised."""
        with self._lock:
            if request in self._queued:
                self._queued_tokens += num_tokens - self._queued[request]
                self._queued[request] = num_tokens

    def leave_queue(self, request: Request) -> None:
        """The request was scheduled for the first time, or ended before that. Measures the
        rate at which the queue drains: an exponential average with a half-life of 5 s."""
        with self._lock:
            num_tokens = self._queued.pop(request, None)
            if num_tokens is None:
                return
            self._queued_tokens -= num_tokens
            now = self._clock()
            decay = 0.5 ** ((now - self._rate_at) / _RATE_HALF_LIFE)
            self._rate = self._rate * decay + 0.6931 / _RATE_HALF_LIFE
            self._rate_at = now

    def forget(self, request: Request) -> None:
        """The request has ended; its id is free, unless another has taken it already."""
        self.leave_queue(request)
        with self._lock:
            self._replaced.discard(request)
            if self._live.get(request.request_id) is request:
                del self._live[request.request_id]

    def close(self, error: Callable[[], AsyncLLMError]) -> list[Request]:
        """From now on ``reserve`` raises ``error()``. Returns every request that has not ended,
        aborted ones included."""
        with self._lock:
            self._closed = error
            return [*self._live.values(), *self._replaced]
