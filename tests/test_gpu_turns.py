"""Tests of a GPU take turns where they have to."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu_turns import turn


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [(False, False, True), (False, True, False), (True, False, False), (True, True, False)],
)
def test_one_that_is_alone_shares_with_none(
    tmp_path: Path, first: bool, second: bool, together: bool
) -> None:
    path = tmp_path / "lock"
    with turn(alone=first, path=path), ExitStack() as stack:
        if together:
            stack.enter_context(turn(alone=second, path=path, wait=False))
        else:
            with pytest.raises(BlockingIOError):
                stack.enter_context(turn(alone=second, path=path, wait=False))
    with turn(alone=second, path=path, wait=False):
        pass
