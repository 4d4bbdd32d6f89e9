"""check_triton: checks that Triton can compile and launch kernels here."""

from __future__ import annotations

import importlib
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from asyncllm.errors import EngineError
from asyncllm.validation import explain

MIN_VERSION = (3, 6)


def check_triton() -> None:
    """Checks that Triton and all that it needs to launch kernels are installed.

    To launch kernels, Triton needs a C compiler, Python's headers, and a folder for compiled
    kernels.

    Raises:
        EngineError: one of these is missing; the message says which, and how to get it.
    """
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        raise EngineError(
            f"Triton cannot be imported ({error}): install triton>=3.6, or choose "
            'attention_backend="torch"'
        ) from error
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MIN_VERSION:
        raise EngineError(
            f"Triton {triton.__version__} is too old: expected 3.6 or later, or "
            'attention_backend="torch"'
        )
    if triton.knobs.runtime.interpret or triton.knobs.build.impl is not None:
        return
    compiler = os.environ.get("CC")
    candidates = [compiler] if compiler else ["gcc", "clang"]
    if not any(map(shutil.which, candidates)):
        none = "neither gcc nor clang is on the PATH"
        missing = f"CC={compiler!r} is not found" if compiler else none
        raise EngineError(
            f"Triton needs a C compiler to launch kernels, and {missing}: "
            "install gcc (on Debian and Ubuntu: apt install gcc), or choose "
            'attention_backend="torch"'
        )
    header = _python_header()
    if not header.exists():
        raise EngineError(
            f"Triton needs Python's headers to launch kernels, and {header} is not there: install "
            "them (on Debian and Ubuntu: apt install python3-dev), or choose "
            'attention_backend="torch"'
        )
    # A cache manager that the application has set may need no folder.
    if triton.knobs.cache.manager_class is None:
        _check_cache_folder(triton.knobs.cache.dir)


def _check_cache_folder(folder: str) -> None:
    """Checks that Triton can write its cache folder; otherwise its first kernel would fail.

    It is not writable in a read-only container, or for a user without a home directory.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EngineError(
            f"Triton compiles kernels into the folder {folder!r}, which cannot be written "
            f"({explain(error)}): set the environment variable TRITON_CACHE_DIR to one that can, "
            'or choose attention_backend="torch"'
        ) from error


def _python_header() -> Path:
    scheme = sysconfig.get_default_scheme()
    # Debian's default scheme points to /usr/local, which never contains Python's headers.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
