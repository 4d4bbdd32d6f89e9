"""Child processes of tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any


def python(
    *arguments: str, timeout: float = 300, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs an interpreter to its end.

    Args:
        arguments: of the interpreter; behind ``-c`` or ``-m`` those of the program.
        options: of ``subprocess.run``.
    """
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=check, **options
    )


def hear_ctrl_c() -> None:
    """For ``preexec_fn``: where tests run in the background, children would inherit that
    SIGINT is ignored, and Python would not turn it into KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
