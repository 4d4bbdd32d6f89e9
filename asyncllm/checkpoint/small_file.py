"""read_small_file: reads a configuration file, bounded in size and time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncllm.errors import ModelLoadError

MAX_SMALL_FILE_BYTES = 2**26
"""Maximum size in bytes of a configuration, a weight index or a chat template."""

MAX_TOKENIZER_BYTES = 2**29
"""Maximum size in bytes of ``tokenizer.json``."""


@contextmanager
def converting_read_errors(path: object) -> Iterator[None]:
    """Convert errors of reading ``path`` to ModelLoadError.

    torch and safetensors raise some errors of the operating system as RuntimeError.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelLoadError(f"{path!s:.300}: cannot be read ({reason})") from error


def check_regular_file(path: Path, status: os.stat_result) -> None:
    """Raise ModelLoadError unless ``status`` is that of a regular file.

    Opening a FIFO would wait forever, and reading a device might never end.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ModelLoadError(f"{path}: is no regular file")


def read_small_file(path: Path, max_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes:
    """Read a regular file of at most ``max_bytes`` bytes; links are followed.

    Raises:
        OSError: as ``open``.
        ModelLoadError: for another kind of file, or a larger one.
    """
    # O_NONBLOCK: do not wait for a FIFO's writer. Windows lacks it, and needs O_BINARY instead,
    # because it opens files as text.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        check_regular_file(path, status)
        # The file may grow after fstat, so the read is bounded too.
        if status.st_size > max_bytes or len(content := file.read(max_bytes + 1)) > max_bytes:
            raise ModelLoadError(
                f"{path}: has {status.st_size} bytes, expected at most {max_bytes}"
            )
        return content
