"""Turns on a GPU that several processes of pytest share (``pytest -n``)."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LOCK = Path(tempfile.gettempdir()) / f"asyncllm-gpu-tests-{os.getuid()}.lock"


@contextmanager
def turn(*, alone: bool, path: Path = LOCK, wait: bool = True) -> Iterator[None]:
    """Within it, no other process has a turn, or with ``alone=False`` none that is alone.

    Raises:
        BlockingIOError: without ``wait``, another has one.
    """
    with path.open("a") as file:
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
        yield


@pytest.fixture
def alone_on_the_gpu() -> Iterator[None]:
    """For a test that looks at the memory of the whole device."""
    with turn(alone=True):
        yield


@pytest.fixture
def beside_others() -> Iterator[None]:
    """For a test that takes little of the device."""
    with turn(alone=False):
        yield
