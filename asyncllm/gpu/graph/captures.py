"""CAPTURES, compiling_alone: turns of a process's engines to capture and to compile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ProcessCaptures:
    """The lock ("turn") for captures, and the graphs whose capture failed.

    There is one per process, because a capture changes torch's allocators, its default generator
    and Python's garbage collection, of which a process has one. While any thread captures, or sends
    its allocations to a pool of its own, torch fails if another calls ``torch.cuda.empty_cache``:
    whoever does one of the three takes the turn.

    A failed graph stays until the process ends: torch's allocator of pinned memory keeps a pointer
    to it, uses it at each allocation under a later capture of any engine, and cannot be made to
    forget it from Python.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def turn(self, seconds: float = -1) -> Iterator[None]:
        """Waits for the turn, and holds it within the context.

        Args:
            seconds: longest wait; -1 is without limit.

        Raises:
            TimeoutError: another engine holds it for longer.
        """
        if not self._lock.acquire(timeout=seconds):
            raise TimeoutError(f"another engine captured CUDA graphs for more than {seconds:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def keep(self, graph: torch.cuda.CUDAGraph) -> None:
        """Keeps a failed graph, to which torch still has a pointer; call it under the turn."""
        self._failed.append(graph)


CAPTURES = ProcessCaptures()

COMPILE_SECONDS = 120.0
"""How long an engine waits for another that compiles."""

_COMPILING = threading.Lock()
"""One per process, like Triton's tables of compiled kernels, which have no lock."""


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Context of an engine's first steps, which compile kernels.

    Engines that start at the same time take turns, so that the second finds the kernels of the
    first. An engine that hangs here holds up the others for ``COMPILE_SECONDS`` at most; then they
    compile the same kernels again.
    """
    held = _COMPILING.acquire(timeout=COMPILE_SECONDS)
    try:
        yield
    finally:
        if held:
            _COMPILING.release()
