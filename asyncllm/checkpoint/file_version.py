"""FileVersion: a file of weights as it was first seen, to notice another in its place."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from asyncllm.errors import ModelLoadError


class FileVersion:
    """Size and time of a file, which is mapped and read bit by bit: were another written in its
    place meanwhile, the weights would be a mixture of two checkpoints, and a read behind the end of
    one that was cut short would end the process.

    Raises:
        OSError: there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self._time = _seen(path)

    def check(self) -> None:
        """Raises ModelLoadError if it has changed. What is mapped outlives its name."""
        with suppress(FileNotFoundError):
            if _seen(self.path) != (self.size, self._time):
                raise ModelLoadError(f"{self.path}: was changed while it was loaded")


def _seen(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
