"""FileVersion: notices that a weight file changed while it was being read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from asyncllm.checkpoint.small_file import check_regular_file
from asyncllm.errors import ModelLoadError


class FileVersion:
    """Size and modification time of a file when reading began.

    A weight file is mapped and read piece by piece. If it were overwritten meanwhile, the weights
    would mix two checkpoints; if it were truncated, a read beyond its end would crash the process.

    Raises:
        OSError: if there is no such file.
        ModelLoadError: if it is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self._mtime = _size_and_mtime(path)

    def check_unchanged(self) -> None:
        """Raise ModelLoadError if the file has changed.

        A deleted file is accepted, because its mapping stays valid.
        """
        with suppress(FileNotFoundError):
            if _size_and_mtime(self.path) != (self.size, self._mtime):
                raise ModelLoadError(f"{self.path}: was changed while it was loaded")


def _size_and_mtime(path: Path) -> tuple[int, int]:
    status = path.stat()
    check_regular_file(path, status)
    return status.st_size, status.st_mtime_ns
