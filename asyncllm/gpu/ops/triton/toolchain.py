"""check_triton: checks that Triton can compile and launch kernels here."""

from __future__ import annotations

import importlib
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from asyncllm.errors import EngineError
from asyncllm.validation import describe_error

MIN_VERSION = (3, 6)


def check_triton() -> None:
    """Checks that Triton and all that it needs to launch kernels are installed.

    To launch kernels, Triton needs a C compiler, Python's headers, and a folder for compiled
    kernels.

    Raises:
        EngineError: one of these is missing; the message says which, and how to get it.
    """
    problem = _missing_requirement()
    if problem is not None:
        raise EngineError(f'{problem}, or choose attention_backend="torch"')


def _missing_requirement() -> str | None:
    """Message about what is missing to launch Triton kernels here, with its remedy; None if
    nothing is missing."""
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported ({error}): install triton>=3.6"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MIN_VERSION:
        return f"Triton {triton.__version__} is too old: expected 3.6 or later"
    if triton.knobs.runtime.interpret or triton.knobs.build.impl is not None:
        return None
    compiler = os.environ.get("CC")
    candidates = [compiler] if compiler else ["gcc", "clang"]
    if not any(map(shutil.which, candidates)):
        none = "neither gcc nor clang is on the PATH"
        missing = f"CC={compiler!r} is not found" if compiler else none
        return (
            f"Triton needs a C compiler to launch kernels, and {missing}: install gcc (on Debian "
            "and Ubuntu: apt install gcc)"
        )
    header = _python_header()
    if not header.exists():
        return (
            f"Triton needs Python's headers to launch kernels, and {header} is not there: install "
            "them (on Debian and Ubuntu: apt install python3-dev)"
        )
    # A cache manager that the application has set may need no folder.
    if triton.knobs.cache.manager_class is not None:
        return None
    # In a read-only container, and for a user without a home directory, Triton's first kernel would
    # fail.
    folder = triton.knobs.cache.dir
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return (
            f"Triton compiles kernels into the folder {folder!r}, which cannot be written "
            f"({describe_error(error)}): set the environment variable TRITON_CACHE_DIR to one "
            "that can"
        )


def _python_header() -> Path:
    scheme = sysconfig.get_default_scheme()
    # Debian's default scheme points to /usr/local, which never contains Python's headers.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
