"""Parameters of which some alone come with every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *often: Any) -> list[Any]:
    """Mark all values slow but for those of ``often``, one for each kind of them."""
    values = list(values)
    assert all(one in values for one in often), often
    return [v if v in often else pytest.param(v, marks=pytest.mark.slow) for v in values]
