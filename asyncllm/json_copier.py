"""JsonCopier: makes bounded copies of the JSON values that a caller passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from types import NoneType
from typing import Any

SCALAR_TYPES = frozenset({str, bool, int, float, NoneType})


_MIN_CACHED_COPY_VALUES = 16
"""Minimum number of values in a flat container (one that holds no containers) whose copy is cached
and shared."""


class NotJsonError(Exception):
    """Error for a value without a JSON equivalent, or beyond a limit. If a method of the value
    raised an error, that is the cause (``__cause__``)."""

    def __init__(self, problem: str, is_limit: bool = False) -> None:
        super().__init__(problem)
        self._is_limit = is_limit
        self._path: list[str] = []

    def add_parent_key(self, container: Any, key: Any) -> None:
        """Extend the error's path by the key or index of the faulty value in ``container``."""
        name = key if type(key) is str else f"<{type(key).__name__}>"
        self._path.append(f".{name:.40}" if type(container) is dict else f"[{key}]")

    def message_for(self, root_name: str) -> str:
        """Make a message that begins with the faulty value's path, starting at ``root_name``."""
        where = root_name + "".join(reversed(self._path))
        return f"{where:.80}: {self}" if self._is_limit else f"{where}: {self}"


def convert_scalar_subclass(value: Any) -> Any:
    """Convert an object of a subclass of ``str``, ``int`` or ``float`` to the plain type."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise NotJsonError(f"a {type(value).__name__}")


class JsonCopier:
    """Copies values to dicts, lists and scalars, within limits for all its copies together.

    The size of a container is checked before it is read. A container that occurs again counts
    again, but is copied once: a few lists that share their items may stand for more values than
    anyone can visit. Its occurrences share the copy, so a copy must not be changed.

    Args:
        max_values: maximum number of values; containers and keys of dicts count too.
        max_characters: maximum number of characters of all strings. An integer counts as one
            character for each 4 bits.
        max_depth: maximum nesting depth.
        convert: function that converts a value of another type, or raises NotJsonError.
        scalar_types: types whose values need no conversion.
        require_text_keys: refuse keys other than strings, and convert tuples to lists.

    Attributes:
        texts: all strings, each as often as it occurs.
    """

    def __init__(
        self,
        max_values: int,
        max_characters: int,
        max_depth: int,
        convert: Callable[[Any], Any] = convert_scalar_subclass,
        *,
        scalar_types: frozenset[type] = SCALAR_TYPES,
        require_text_keys: bool = False,
    ) -> None:
        self.texts: list[str] = []
        self.max_values, self.max_characters, self.max_depth = max_values, max_characters, max_depth
        self.num_values = self.num_characters = 0
        self._convert = convert
        self._scalar_types = scalar_types
        self._require_text_keys = require_text_keys
        self._copies: dict[int, tuple[Any, ...]] = {}
        """Copies by the id of their source. An entry keeps its source alive, so that no other
        object gets the id."""
        self._last_height = 0
        """Nesting depth of the value that was copied last."""

    def copy(self, value: Any) -> Any:
        """Copy a value.

        Raises:
            NotJsonError: for a value without a JSON equivalent, or beyond a limit.
        """
        self._add_to_totals(1)
        if type(value) in self._scalar_types:
            self._count_characters((value,), {type(value)})
            return value
        return self._copy_value(value, 0)

    def copy_items(self, values: Collection[Any]) -> list[Any]:
        """Copy several values; an error's path begins with the faulty value's index."""
        self._add_to_totals(len(values))
        # The iterator of a subclass may have no end.
        copied = list(itertools.islice(values, self.max_values + 1))
        self._add_to_totals(max(0, len(copied) - len(values)))
        return self._copy_items_in_place(copied, -1)

    def _add_to_totals(self, num_values: int, num_characters: int = 0) -> None:
        self.num_values += num_values
        self.num_characters += num_characters
        if self.num_values > self.max_values:
            raise NotJsonError(f"beyond {self.max_values} values", True)
        if self.num_characters > self.max_characters:
            raise NotJsonError(f"beyond {self.max_characters} characters", True)

    def _count_characters(self, values: Collection[Any], types: Collection[type]) -> None:
        """Count the characters of the scalars in ``values``; ``types`` are the values' types."""
        if str in types:
            texts = values if len(types) == 1 else [one for one in values if type(one) is str]
            self.texts += texts
            self._add_to_totals(0, sum(map(len, texts)))
        if int in types and int in self._scalar_types:
            self._add_to_totals(0, sum(one.bit_length() for one in values if type(one) is int) // 4)

    def _check_depth(self, depth: int) -> None:
        if depth > self.max_depth:
            raise NotJsonError(f"nested more than {self.max_depth} levels deep", True)

    def _copy_value(self, value: Any, depth: int) -> Any:
        """Copy a value of a type other than ``scalar_types``. The caller has counted the value
        itself."""
        earlier = self._copies.get(id(value))
        if earlier is not None:
            _, copied, self._last_height, num_values, num_characters, first, last = earlier
            self._check_depth(depth + self._last_height)
            self._add_to_totals(num_values, num_characters)
            self.texts += self.texts[first:last]
            return copied
        num_values, num_characters, first = self.num_values, self.num_characters, len(self.texts)
        if isinstance(value, (list, tuple)):
            copied = self._copy_sequence(value, depth)
        elif isinstance(value, (dict, Mapping)):
            copied = self._copy_mapping(value, depth)
        else:
            copied = self._convert(value)
            self._last_height = 0
            if type(copied) in SCALAR_TYPES:
                self._count_characters((copied,), {type(copied)})
                return copied
            # Count a conversion as a level of depth, because an object may convert to another
            # object endlessly. A conversion to a dict need not count: the dict's items do.
            copied = self._copy_value(copied, depth + (type(copied) is not dict))
        if self._last_height < 2 and self.num_values - num_values < _MIN_CACHED_COPY_VALUES:
            return copied
        self._copies[id(value)] = (
            value,
            copied,
            self._last_height,
            self.num_values - num_values,
            self.num_characters - num_characters,
            first,
            len(self.texts),
        )
        return copied

    def _copy_mapping(self, value: Any, depth: int) -> dict[Any, Any]:
        if type(value) is dict:
            self._add_to_totals(2 * len(value))
            copied = value.copy()
        else:
            num_pairs = (self.max_values - self.num_values) // 2 + 1
            pairs = list(itertools.islice(value.items(), num_pairs))
            self._add_to_totals(2 * len(pairs))
            copied = dict(pairs)
        types = set(map(type, copied))
        if types == {str}:
            self._count_characters(copied, types)
        elif copied:
            keys = self._copy_items_in_place(list(copied), depth)
            if self._require_text_keys and set(map(type, keys)) != {str}:
                raise NotJsonError("has keys that are not strings")
            copied = dict(zip(keys, copied.values(), strict=True))
        return self._copy_items_in_place(copied, depth)

    def _copy_sequence(self, value: Any, depth: int) -> Any:
        if type(value) in (list, tuple):
            self._add_to_totals(len(value))
            copied = list(value)
        else:
            copied = list(itertools.islice(value, self.max_values - self.num_values + 1))
            self._add_to_totals(len(copied))
        copied = self._copy_items_in_place(copied, depth)
        return tuple(copied) if isinstance(value, tuple) and not self._require_text_keys else copied

    def _copy_items_in_place(self, container: Any, depth: int) -> Any:
        """Replace the items of a shallow copy by copies. ``depth`` is the container's own."""
        is_dict = type(container) is dict
        items = container.values() if is_dict else container
        types, scalar_types, height = set(map(type, items)), self._scalar_types, 0
        if types:
            self._check_depth(depth + 1)
            self._count_characters(items, types)
            height = 1
        if types <= scalar_types:
            pass
        elif self._copy_flat_items(container, types, depth + 1):
            height = 1 + any(container)
        else:
            for key, item in container.items() if is_dict else enumerate(container):
                if type(item) in scalar_types:
                    continue
                try:
                    container[key] = self._copy_value(item, depth + 1)
                except NotJsonError as error:
                    error.add_parent_key(container, key)
                    raise
                # Methods of the caller's own types may raise errors of any class.
                except Exception as error:
                    unreadable = NotJsonError("cannot be read")
                    unreadable.add_parent_key(container, key)
                    raise unreadable from error
                height = max(height, self._last_height + 1)
        self._last_height = height
        return container

    def _copy_flat_items(self, container: Any, types: set[type], depth: int) -> bool:
        """Fast path of ``_copy_items_in_place``, five times as fast. It copies a list of dicts, or
        of lists, that hold only scalars; most messages are such dicts. Returns False, and copies
        nothing, if it does not apply."""
        if type(container) is not list or types not in ({dict}, {list}) or depth >= self.max_depth:
            return False
        is_dict = types == {dict}
        num_values = (1 + is_dict) * sum(map(len, container))
        if self.num_values + num_values > self.max_values:
            return False
        keys = list(itertools.chain.from_iterable(container)) if is_dict else []
        values = list(
            itertools.chain.from_iterable(map(dict.values, container) if is_dict else container)
        )
        value_types = set(map(type, values))
        if not value_types <= self._scalar_types or not set(map(type, keys)) <= {str}:
            return False
        self._add_to_totals(num_values)
        self._count_characters(keys, {str})
        self._count_characters(values, value_types)
        container[:] = map(dict.copy if is_dict else list.copy, container)
        return True
