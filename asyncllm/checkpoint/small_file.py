"""read_small_file: reads a file beside the weights, bounded in size and time."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from asyncllm.errors import ModelLoadError

MAX_BYTES = 2**26
"""Largest configuration, index or chat template."""

MAX_TOKENIZER_BYTES = 2**29
"""Largest ``tokenizer.json``."""


def check_regular(path: Path, status: os.stat_result) -> None:
    """Raise ModelLoadError unless ``status``, of a followed link, is that of a regular file: a FIFO
    would wait for ever, a device would never end."""
    if not stat.S_ISREG(status.st_mode):
        raise ModelLoadError(f"{path}: is no regular file")


def read_small_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most ``most`` bytes; links are followed.

    Raises:
        OSError: as ``open``.
        ModelLoadError: for another kind of file, or a larger one.
    """
    # Without waiting for a FIFO's writer; Windows has no such flag, and opens files as text.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        check_regular(path, status)
        # A file may grow meanwhile.
        if status.st_size > most or len(content := file.read(most + 1)) > most:
            raise ModelLoadError(f"{path}: has {status.st_size} bytes, expected at most {most}")
        return content
