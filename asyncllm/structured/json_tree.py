"""walk_json: iterates over a JSON value and the values nested in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def walk_json(value: Any) -> Iterator[tuple[Any, int]]:
    """Iterate over ``value`` and its nested values, each with its depth. ``value`` has depth 1.

    The iteration does not end if an object contains itself.
    """
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        yield item, depth
        if isinstance(item, Mapping):
            pending += [(nested, depth + 1) for nested in item.values()]
        elif isinstance(item, (list, tuple)):
            pending += [(nested, depth + 1) for nested in item]
