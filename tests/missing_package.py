"""What an import says where a package is not installed."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib, sys

sys.modules[sys.argv[2]] = None
try:
    importlib.import_module(sys.argv[1])
except ImportError as error:
    print(error)
"""


def import_error(module: str, *, without: str) -> str:
    """The ImportError of ``module`` in an interpreter that lacks the package ``without``."""
    command = [sys.executable, "-c", CODE, module, without]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout
