"""An example, run as a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_example(path: Path, *options: str) -> str:
    """What it prints. Raises AssertionError where it fails, or writes to standard error.

    Args:
        options: of the interpreter.
    """
    done = subprocess.run(
        [sys.executable, *options, str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        # More threads than idle cores make a small model slow.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
