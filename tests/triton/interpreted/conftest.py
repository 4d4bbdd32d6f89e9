"""These tests run in a process of their own: see ``tests/triton/test_interpreter.py``.

Triton decides at its import whether it compiles or interprets.
"""

from __future__ import annotations

import os

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]

if INTERPRETING:
    from tests.triton.interpreted import faithful

    faithful.install()
