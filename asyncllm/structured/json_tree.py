"""walk_dicts: iterates over the dicts in a JSON value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def walk_dicts(value: Any) -> Iterator[dict[Any, Any]]:
    """Iterate over the dicts in a value, itself included: those of a lower depth first.

    The iteration does not end if an object contains itself.
    """
    level = [value]
    while level:
        yield from [one for one in level if isinstance(one, dict)]
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, (dict, list, tuple))
        ]
