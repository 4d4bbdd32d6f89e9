"""compiling_alone: one engine of the process at a time compiles kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
