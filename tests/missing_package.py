"""Errors of an import whose package is not installed."""

from __future__ import annotations

from tests.processes import python

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
    return python("-c", CODE, module, without, timeout=60, check=True).stdout
