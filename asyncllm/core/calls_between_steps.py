"""CallsBetweenSteps: other threads' calls, run on the engine thread with no step in flight."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncllm.errors import EngineError


class CallsBetweenSteps:
    """Queue of calls that the engine thread makes for other threads. The future of each call is
    completed, even if the engine closes or dies first.

    Args:
        inbox: the engine thread's command queue, which delivers the calls.
        shutdown_error: function that makes the error of calls that never run.

    Attributes:
        due_calls: calls that the engine thread has received and not yet run; touched by it alone.
    """

    def __init__(
        self, inbox: queue.SimpleQueue[Callable[[], Any]], shutdown_error: Callable[[], EngineError]
    ) -> None:
        self.due_calls: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._inbox = inbox
        self._shutdown_error = shutdown_error
        self._lock = threading.Lock()
        self._unfinished_futures: set[Future[Any]] | None = set()

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        """Queue a call. Any thread may call it. After ``close`` the future has ``shutdown_error()``
        at once."""
        future: Future[Any] = Future()
        with self._lock:
            if self._unfinished_futures is None:
                future.set_exception(self._shutdown_error())
                return future
            self._unfinished_futures.add(future)
        self._inbox.put(partial(self.due_calls.append, (future, function, args)))
        return future

    def run_due_calls(self) -> None:
        """Run the due calls. Must run on the engine thread with no step in flight. Raises the
        exception of a call that fails."""
        while self.due_calls:
            future, function, args = self.due_calls.popleft()
            result = function(*args)
            with self._lock:
                assert self._unfinished_futures is not None
                self._unfinished_futures.discard(future)
            future.set_result(result)

    def close(self) -> None:
        """Fail the calls that have not run, and all later ones. Any thread may call it."""
        with self._lock:
            unfinished, self._unfinished_futures = self._unfinished_futures or set(), None
        for future in unfinished:
            future.set_exception(self._shutdown_error())
