"""CAPTURE_GUARD, exclusive_compilation: locks that let one engine at a time capture or compile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CaptureGuard:
    """The process's lock for CUDA graph captures, and the graphs whose capture failed.

    There is one lock per process, because a capture changes state of the whole process: torch's
    allocators and default generator, and Python's garbage collection. While any thread captures,
    or sends its allocations to a pool of its own, torch fails if another thread calls
    ``torch.cuda.empty_cache``. So a thread takes the lock to capture, to use a pool of its own, and
    to empty torch's cache.

    A failed graph is kept until the process ends: torch's allocator of pinned memory keeps a
    pointer to the graph, uses it at each allocation during a later capture of any engine, and has
    no Python function that removes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed_graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def capture_lock(self, timeout: float = -1) -> Iterator[None]:
        """Context manager that takes the lock and releases it at the end.

        Args:
            timeout: longest wait in seconds; -1 waits without limit.

        Raises:
            TimeoutError: another engine holds the lock for longer than ``timeout``.
        """
        if not self._lock.acquire(timeout=timeout):
            raise TimeoutError(f"another engine captured CUDA graphs for more than {timeout:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def keep_failed_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """Keeps a failed graph, to which torch still has a pointer; the caller holds the lock."""
        self._failed_graphs.append(graph)


CAPTURE_GUARD = CaptureGuard()

COMPILE_LOCK_TIMEOUT_SECONDS = 120.0
"""Maximum number of seconds that an engine waits for another engine's compilation."""

_COMPILE_LOCK = threading.Lock()
"""Lock for compilations, one per process: Triton's tables of compiled kernels are per process and
have no lock."""


@contextmanager
def exclusive_compilation() -> Iterator[None]:
    """Context manager for an engine's first steps, which compile kernels.

    Engines that start at the same time take turns, so that the second finds the kernels of the
    first. An engine that hangs within the context blocks other engines for at most
    ``COMPILE_LOCK_TIMEOUT_SECONDS``; then they compile the same kernels again.
    """
    held = _COMPILE_LOCK.acquire(timeout=COMPILE_LOCK_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        if held:
            _COMPILE_LOCK.release()
