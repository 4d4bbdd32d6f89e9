"""walk_json: iterates over a JSON value and the values nested in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def walk_json(value: Any) -> Iterator[Any]:
    """Iterate over ``value`` and its nested values.

    The iteration does not end if an object contains itself.
    """
    pending = [value]
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, (list, tuple)):
            pending += item
