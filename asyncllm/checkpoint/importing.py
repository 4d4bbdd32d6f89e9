"""importing_transformers: the turns of a process's engines at importing transformers."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

IMPORT_SECONDS = 60.0
"""How long an engine waits for another that imports."""

_IMPORTING = threading.Lock()
"""Of the process, as the imported modules are."""


@contextmanager
def importing_transformers() -> Iterator[None]:
    """Within it, names of transformers are looked up for the first time. Engines that start at once
    take turns: transformers and many of its packages put another module into ``sys.modules`` when
    they are complete, and an ``import`` that waits for another thread's keeps the one that it found
    before, without most of its names. One that hangs there does not hold up the others for good."""
    held = _IMPORTING.acquire(timeout=IMPORT_SECONDS)
    try:
        # The application may import it at the same time. Unlike the statement, this looks again.
        importlib.import_module("transformers")
        yield
    finally:
        if held:
            _IMPORTING.release()
