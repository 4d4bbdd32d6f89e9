"""TokenizerThread: worker thread for texts too long for the event loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from asyncllm.errors import RequestError
from asyncllm.validation import explain

LONG_TEXT = 4096
"""Texts of this many characters or more go to a worker thread."""


class TokenizerThread:
    """Runs jobs in order on a daemon thread that lives only while there are any.

    A job reports its own result. One that raises ends the thread with Python's usual message: that
    is a bug of asyncllm.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; any thread.

        Raises:
            RequestError: if no thread can be started; a later job may succeed.
        """
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:
                    raise RequestError(
                        f"a long text needs a thread, and none can be started ({explain(error)})"
                    ) from error
                self._thread = thread
            self._jobs.append(job)

    def close(self) -> threading.Thread | None:
        """Drop jobs that have not begun; returns the thread if one is running."""
        with self._lock:
            self._jobs.clear()
            return self._thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            job()
