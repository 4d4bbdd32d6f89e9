"""IdleCalls: calls of other threads that the engine thread runs while no step is in flight."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncllm.errors import EngineError


class IdleCalls:
    """Queue of calls, each with a future that is completed in every case.

    Args:
        inbox: of the engine thread, which learns of a call there.

    Attributes:
        due: what the engine thread has drained and not yet run; its own.
    """

    def __init__(self, inbox: queue.SimpleQueue[Callable[[], Any]]) -> None:
        self.due: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._inbox = inbox
        self._lock = threading.Lock()
        self._unfinished: set[Future[Any]] | None = set()

    def __len__(self) -> int:
        """Calls whose future has not been completed."""
        return len(self._unfinished or ())

    def submit(
        self, run: Callable[..., Any], args: tuple[Any, ...], ending: Callable[[], EngineError]
    ) -> Future[Any]:
        """Any thread. Once closed, the future has ``ending()``."""
        future: Future[Any] = Future()
        with self._lock:
            if self._unfinished is None:
                future.set_exception(ending())
                return future
            self._unfinished.add(future)
        self._inbox.put(partial(self.due.append, (future, run, args)))
        return future

    def run_due(self) -> None:
        """On the engine thread, with no step in flight. Raises what a call raises."""
        while self.due:
            future, run, args = self.due.popleft()
            result = run(*args)
            with self._lock:
                assert self._unfinished is not None
                self._unfinished.discard(future)
            future.set_result(result)

    def close(self, ending: Callable[[], EngineError]) -> None:
        """Fails the calls that have not run, and all later ones; any thread."""
        with self._lock:
            unfinished, self._unfinished = self._unfinished or set(), None
        for future in unfinished:
            future.set_exception(ending())
