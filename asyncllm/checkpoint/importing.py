"""importing_transformers: lets a process's engines import transformers one at a time."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

IMPORT_LOCK_TIMEOUT_SECONDS = 60.0
"""Maximum seconds that an engine waits while another engine imports transformers."""

_IMPORT_LOCK = threading.Lock()
"""One lock per process, because modules are imported once per process."""


@contextmanager
def importing_transformers() -> Iterator[None]:
    """Import transformers, and hold a lock while the caller imports names from it.

    transformers and many of its packages replace themselves in ``sys.modules`` once they are
    imported; another thread that imports them at the same time keeps the incomplete module. An
    engine whose import hangs blocks other engines for IMPORT_LOCK_TIMEOUT_SECONDS only.
    """
    is_locked = _IMPORT_LOCK.acquire(timeout=IMPORT_LOCK_TIMEOUT_SECONDS)
    try:
        # The application may import transformers at the same time. Unlike the ``import``
        # statement, import_module looks into ``sys.modules`` again after the import.
        importlib.import_module("transformers")
        yield
    finally:
        if is_locked:
            _IMPORT_LOCK.release()
