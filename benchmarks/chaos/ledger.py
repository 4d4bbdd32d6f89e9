"""The ledger: what became of every request, and every discrepancy."""

from __future__ import annotations

import collections
import threading

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
