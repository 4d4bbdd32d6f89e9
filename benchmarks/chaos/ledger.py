"""The ledger: what became of every request, and every discrepancy."""

from __future__ import annotations

import collections
import threading
import time
from typing import Any

from asyncllm import AsyncLLMEngine
from benchmarks.chaos.workload import Task


class Ledger:
    """Counts outcomes and collects what must not be. Shared by all threads."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.ties = 0
        self.tokens = 0
        self.cancel_to_free: list[float] = []
        self._lock = threading.Lock()

    def note(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def complain(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)

    def compare(self, task: Task, got: list[int], reason: str | None) -> None:
        """A finished stream has the tokens of the request alone; another has the first of
        them."""
        expected = list(task.expected)
        whole = reason in ("stop", "length")
        with self._lock:
            self.tokens += len(got)
            if got != (expected if whole else expected[: len(got)]):
                self.wrong.append(f"{reason}: {got} instead of {expected} for {task.options}")

    def watch_aborts(self, engine: AsyncLLMEngine) -> None:
        """Measures from ``abort`` to the moment the request's blocks are back."""
        assert engine._thread is not None
        core = engine._thread.core
        abort, on_abort = core.abort, core.on_abort
        began: dict[Any, float] = {}

        def timed_abort(request: Any) -> None:
            began.setdefault(request, time.perf_counter())
            abort(request)

        def timed_on_abort(request: Any) -> None:
            on_abort(request)
            at = began.pop(request, None)
            if at is not None:
                self.cancel_to_free.append(time.perf_counter() - at)

        core.abort = timed_abort  # type: ignore[method-assign]
        core.on_abort = timed_on_abort  # type: ignore[method-assign]
