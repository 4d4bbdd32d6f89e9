"""CAPTURES: the turn and the failed graphs of a process's CUDA graph captures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ProcessCaptures:
    """The turn to capture, and the graphs whose capture failed.

    One object of the process, as are torch's allocators, its default generator and Python's
    garbage collection, which a capture changes. While any thread captures, or sends its
    allocations to a pool of its own, ``torch.cuda.empty_cache`` in another is an error of torch,
    so whoever does one of the three takes the turn.

    A failed graph stays until the process ends: torch's allocator of pinned memory keeps a pointer
    to it, asks it at each allocation under a later capture, of any engine, and has no call from
    Python that makes it forget.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._failed: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def turn(self, seconds: float = -1) -> Iterator[None]:
        """Waits for the turn, and has it within the context.

        Args:
            seconds: to wait at most; -1 is without end.

        Raises:
            TimeoutError: another engine has it for longer.
        """
        if not self._turn.acquire(timeout=seconds):
            raise TimeoutError(f"another engine captured CUDA graphs for more than {seconds:g} s")
        try:
            yield
        finally:
            self._turn.release()

    def keep(self, graph: torch.cuda.CUDAGraph) -> None:
        """Keeps a graph that torch goes on asking; under the turn."""
        self._failed.append(graph)


CAPTURES = ProcessCaptures()
