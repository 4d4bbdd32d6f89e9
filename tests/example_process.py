"""An example, run as a program."""

from __future__ import annotations

import os
from pathlib import Path

from tests.processes import python


def run_example(path: Path, *options: str) -> str:
    """What it prints. Raises AssertionError where it fails, or writes to standard error.

    Args:
        options: of the interpreter.
    """
    # More threads than idle cores make a small model slow.
    done = python(*options, str(path), timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
