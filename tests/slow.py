"""Parameters of which only some run every time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *often: Any) -> list[Any]:
    """Mark all values slow but for those of ``often``, one for each kind of them. A tuple is a row
    of several parameters."""
    values = list(values)
    assert all(one in values for one in often), often
    rows = [(v, v if type(v) is tuple else (v,)) for v in values]
    return [v if v in often else pytest.param(*row, marks=pytest.mark.slow) for v, row in rows]
