"""Checks of refused requests by the name of the argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncllm import InvalidRequestError


@contextmanager
def refused(
    param: str, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[InvalidRequestError]]:
    """Expect an InvalidRequestError that names ``param``, with a message that ``match`` finds."""
    with pytest.raises(InvalidRequestError, match=match) as caught:
        yield caught
    assert caught.value.param == param
