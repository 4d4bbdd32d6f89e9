"""Library: loads the compiled ops and checks them against the sources."""

from __future__ import annotations

import ctypes
from pathlib import Path

from asyncllm.native.build import LIBRARY, fingerprint
from asyncllm.native.interface import SIGNATURES


class NativeUnavailableError(Exception):
    """No native library works here; the message says why."""


class Library:
    """The library's functions, as attributes by name without the prefix.

    Raises:
        NativeUnavailableError: the library has not been built, or was built for another machine
            or from other sources than those beside it.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        if not path.exists():
            raise NativeUnavailableError("the native ops have not been compiled")
        try:
            self._library = ctypes.CDLL(str(path))
            self._take("sources")
        except (OSError, AttributeError) as error:
            raise NativeUnavailableError(f"the native ops cannot be loaded: {error}") from error
        if self.sources().decode() != fingerprint():
            raise NativeUnavailableError(f"{path} was compiled from other sources")
        for name in SIGNATURES:
            self._take(name)

    def _take(self, name: str) -> None:
        function = getattr(self._library, f"asyncllm_{name}")
        function.restype, function.argtypes = SIGNATURES[name]
        setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(name)
