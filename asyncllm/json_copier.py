"""JsonCopier: makes bounded copies of the JSON values that a caller passes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, islice, repeat
from types import NoneType
from typing import Any, NoReturn, TypeAlias

SCALAR_TYPES = frozenset({str, bool, int, float, NoneType})

_COPIED_TYPES = frozenset({dict, list})
"""Types whose objects are copied with their own ``copy`` method. Tuples and other containers are
first converted to one of these types."""

_BYTES_PER_VALUE = 80
"""Estimated bytes of each key, value and container, in addition to strings."""

_Level: TypeAlias = tuple[list[dict[Any, Any]], list[list[Any]]]
"""All dicts and all lists at one nesting depth."""


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

    def add_ancestor_keys(self, container: Any, levels: list[_Level]) -> None:
        """Extend the error's path by the keys that lead to ``container``.

        Args:
            levels: all levels from the root's to the container's own.
        """
        for level in levels[-2::-1]:
            parent, key = next(place for place in _places(level) if place[0][place[1]] is container)
            self.add_parent_key(parent, key)
            container = parent

    def remove_root_key(self) -> None:
        """Remove the first key of the path: the index in a list that only holds the root."""
        del self._path[-1:]

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


def _places(level: _Level) -> Iterator[tuple[Any, Any]]:
    """Iterate over the containers with each of their keys or indices."""
    dicts, lists = level
    for one in dicts:
        yield from zip(repeat(one), one)
    for one in lists:
        yield from zip(repeat(one), range(len(one)))


def _of_type(kind: type, values: Any, types: Collection[type]) -> Any:
    """Return the values of a type; ``types`` are the types of all values."""
    if kind not in types:
        return []
    return values if len(types) == 1 else [one for one in values if type(one) is kind]


def _raise_located(error: Exception, levels: list[_Level], container: Any, *keys: Any) -> NoReturn:
    """Raise a NotJsonError with the path of the keys that lead to the faulty value."""
    # Methods of the caller's own types may raise errors of any class.
    is_own = isinstance(error, NotJsonError)
    located = error if is_own else NotJsonError("cannot be read")
    for key in keys:
        located.add_parent_key(container, key)
    located.add_ancestor_keys(container, levels)
    raise located from error.__cause__ if is_own else error


class JsonCopier:
    """Copies values to dicts, lists and scalars, within limits for all its copies together.

    The containers of one depth are copied together by a few calls, which takes a fraction of the
    time of a call for each. The values of a depth are counted before they are copied. So lists that
    share their items are refused before they are expanded, and a container that holds itself is
    refused.

    Args:
        max_values: maximum number of values; containers and keys of dicts count too.
        max_characters: maximum number of characters of all strings. An integer counts as one
            character for each 4 bits.
        max_depth: maximum nesting depth.
        convert: function that converts a value of another type, or raises NotJsonError.
        max_containers: maximum number of containers; ``max_values`` by default.
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
        max_containers: int | None = None,
        scalar_types: frozenset[type] = SCALAR_TYPES,
        require_text_keys: bool = False,
    ) -> None:
        self.texts: list[str] = []
        self.max_values, self.max_characters, self.max_depth = max_values, max_characters, max_depth
        self.max_containers = max_values if max_containers is None else max_containers
        self.num_values = self.num_characters = self.num_containers = 0
        self._convert = convert
        self._scalar_types = scalar_types
        self._plain_types = scalar_types | _COPIED_TYPES
        self._require_text_keys = require_text_keys
        self._converted: dict[int, tuple[Any, Any, bool, int]] = {}
        """Converted containers by the id of their source: the source, the dict or list made from
        it, whether it becomes a tuple, and its number of values. The source is kept so that no
        other object gets its id."""

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the copies, in bytes."""
        return sum(map(sys.getsizeof, self.texts)) + _BYTES_PER_VALUE * self.num_values

    def copy(self, value: Any, *, is_parsed: bool = False) -> Any:
        """Copy a value.

        Args:
            is_parsed: whether a JSON parser has just made the value. It is then only counted.

        Raises:
            NotJsonError: for a value without a JSON equivalent, or beyond a limit.
        """
        self._add_to_totals(1)
        try:
            return self._copy_items_in_place([value], -1, is_parsed)[0]
        except NotJsonError as error:
            error.remove_root_key()
            raise

    def copy_items(self, values: Collection[Any], *, are_parsed: bool = False) -> list[Any]:
        """Copy several values; an error's path begins with the faulty value's index.

        Args:
            are_parsed: whether a JSON parser has just made the values. They are then only counted.
        """
        self._add_to_totals(len(values))
        # The iterator of a subclass may have no end.
        copied = list(islice(values, self.max_values + 1))
        self._add_to_totals(max(0, len(copied) - len(values)))
        return self._copy_items_in_place(copied, -1, are_parsed)

    def _add_to_totals(self, num_values: int, num_characters: int = 0) -> None:
        self.num_values += num_values
        self.num_characters += num_characters
        if self.num_values > self.max_values:
            raise NotJsonError(f"beyond {self.max_values} values", True)
        if self.num_characters > self.max_characters:
            raise NotJsonError(f"beyond {self.max_characters} characters", True)

    def _count_containers(self, num_containers: int) -> None:
        self.num_containers += num_containers
        if self.num_containers > self.max_containers:
            raise NotJsonError(f"beyond {self.max_containers} dicts and lists", True)

    def _count_characters(self, values: Collection[Any], types: Collection[type]) -> None:
        """Count the characters of the scalars in ``values``; ``types`` are the values' types."""
        if str in types:
            texts = _of_type(str, values, types)
            self.texts += texts
            self._add_to_totals(0, sum(map(len, texts)))
        if int in types and int in self._scalar_types:
            num_bits = sum(map(int.bit_length, _of_type(int, values, types)))
            self._add_to_totals(0, num_bits // 4)

    def _copy_items_in_place(
        self, root: list[Any], depth: int, are_parsed: bool = False
    ) -> list[Any]:
        """Replace the items of ``root``, a list at ``depth``, by copies. Items that a JSON
        parser has just made are only counted."""
        levels: list[_Level] = [([], [root])]
        tuple_places: list[tuple[Any, Any]] = []
        while any(levels[-1]):
            levels.append(self._copy_level(levels, depth, tuple_places, are_parsed))
            depth += 1
        # Inner tuples first, because a tuple cannot be changed.
        for container, key in reversed(tuple_places):
            container[key] = tuple(container[key])
        return root

    def _copy_level(
        self,
        levels: list[_Level],
        depth: int,
        tuple_places: list[tuple[Any, Any]],
        are_parsed: bool,
    ) -> _Level:
        """Replace the items of all containers of the last level by shallow copies, unless they are
        parsed; returns the level that they form.

        Args:
            levels: copied levels, from the root's to the one whose items are replaced.
            depth: depth of the last level.
            tuple_places: list to which the container and key of each future tuple are added.
        """
        dicts, lists = levels[-1]
        if dicts:
            self._copy_keys(levels, depth)
        items = list(
            chain(chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(lists))
        )
        if items and depth >= self.max_depth:
            _raise_located(self._depth_error(), levels, next(filter(None, chain(dicts, lists))))
        types = set(map(type, items))
        self._count_characters(items, types)
        if types <= self._scalar_types:
            return [], []
        inner_dicts, inner_lists = _of_type(dict, items, types), _of_type(list, items, types)
        self._count_containers(len(inner_dicts) + len(inner_lists))
        self._add_to_totals(2 * sum(map(len, inner_dicts)) + sum(map(len, inner_lists)))
        if are_parsed:
            return inner_dicts, inner_lists
        if not types <= self._plain_types:
            for index, place in enumerate(_places(levels[-1])):
                if type(items[index]) not in self._plain_types:
                    try:
                        items[index], is_tuple = self._convert_item(items[index], depth + 1)
                    except Exception as error:
                        _raise_located(error, levels, *place)
                    if is_tuple:
                        tuple_places.append(place)
            types = set(map(type, items))
        if len(types) == 1 and types <= _COPIED_TYPES:
            items = list(map(type(items[0]).copy, items))
        else:
            items = [one.copy() if type(one) in _COPIED_TYPES else one for one in items]
        # For dicts of one key, this loop takes a quarter of the time of ``update``.
        remaining = iter(items)
        for one in dicts:
            for key in one:
                one[key] = next(remaining)
        for one in lists:
            one[:] = islice(remaining, len(one))
        return _of_type(dict, items, types), _of_type(list, items, types)

    def _copy_keys(self, levels: list[_Level], depth: int) -> None:
        """Count the characters of the last level's keys, and convert keys that are no scalars."""
        dicts, _ = levels[-1]
        keys = list(chain.from_iterable(dicts))
        types = set(map(type, keys))
        if types <= ({str} if self._require_text_keys else self._scalar_types):
            self._count_characters(keys, types)
            return
        for one in filter(None, dicts):
            try:
                copied = self._copy_items_in_place(list(one), depth)
                if self._require_text_keys and set(map(type, copied)) != {str}:
                    raise NotJsonError("has keys that are not strings")
                values = list(one.values())
                one.clear()
                one.update(zip(copied, values, strict=True))
            except Exception as error:
                _raise_located(error, levels, one)

    def _convert_item(self, item: Any, depth: int) -> tuple[Any, bool]:
        """Convert an object of another type to a scalar, dict or list, and count what it holds.

        Returns:
            The converted object, and whether it is to become a tuple.
        """
        if type(item) in SCALAR_TYPES:
            return self._convert(item), False
        if id(item) not in self._converted:
            value = item
            # An object may convert to another object endlessly.
            for _ in range(depth, self.max_depth + 2):
                if isinstance(value, (list, tuple, dict, Mapping)):
                    break
                value = self._convert(value)
                if type(value) in SCALAR_TYPES:
                    self._count_characters((value,), {type(value)})
                    return value, False
            else:
                raise self._depth_error()
            is_tuple = isinstance(value, tuple) and not self._require_text_keys
            room = self.max_values - self.num_values + 1
            if isinstance(value, (list, tuple)):
                value = list(islice(value, room))
                num_values = len(value)
            else:
                pairs = list(islice(value.items(), room))
                value, num_values = dict(pairs), 2 * len(pairs)
            self._converted[id(item)] = item, value, is_tuple, num_values
        _, value, is_tuple, num_values = self._converted[id(item)]
        self._count_containers(1)
        self._add_to_totals(num_values)
        return value, is_tuple

    def _depth_error(self) -> NotJsonError:
        return NotJsonError(f"nested more than {self.max_depth} levels deep", True)
