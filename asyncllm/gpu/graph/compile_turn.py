"""compiling_alone: the turns of a process's engines at compiling kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

COMPILE_SECONDS = 120.0
"""How long an engine waits for another that compiles."""

_COMPILING = threading.Lock()
"""Of the process, as are Triton's tables of compiled kernels, which have no lock of their own."""


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Within it, steps are run for the first time. Engines that start at once take turns, so that
    the second finds the kernels of the first. One that hangs there does not hold up the others for
    good: after ``COMPILE_SECONDS`` they go on, at the price of compiling the same twice."""
    held = _COMPILING.acquire(timeout=COMPILE_SECONDS)
    try:
        yield
    finally:
        if held:
            _COMPILING.release()
