"""Library: loads the compiled native library, and checks that it fits the sources."""

from __future__ import annotations

import ctypes
from pathlib import Path

from asyncllm.native.build import LIBRARY_PATH, sources_digest
from asyncllm.native.interface import SIGNATURES


class NativeUnavailableError(Exception):
    """The native library is missing or does not work here; the message says why."""


class Library:
    """The native library; its functions are attributes, without the prefix ``asyncllm_``.

    Raises:
        NativeUnavailableError: the library has not been built, or was built for another machine or
            from other sources than those in this package.
    """

    def __init__(self, path: Path = LIBRARY_PATH) -> None:
        if not path.exists():
            raise NativeUnavailableError("the native ops have not been compiled")
        try:
            self._library = ctypes.CDLL(str(path))
            self._declare_function("sources")
        except (OSError, AttributeError) as error:
            raise NativeUnavailableError(f"the native ops cannot be loaded: {error}") from error
        if self.sources().decode() != sources_digest():
            raise NativeUnavailableError(f"{path} was compiled from other sources")
        for name in SIGNATURES:
            self._declare_function(name)

    def _declare_function(self, name: str) -> None:
        function = getattr(self._library, f"asyncllm_{name}")
        function.restype, function.argtypes = SIGNATURES[name]
        setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(name)
