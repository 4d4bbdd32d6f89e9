"""Validation: converts arguments to plain Python values, or raises a clear error.

An error names the field, its value and the accepted range. Numbers may be numpy's. Each number has
a bound, because an unbounded number would raise later, where it is converted, on the thread that
serves every request.

Each function takes ``optional=True``, which accepts None, and ``make_error``, a function that makes
an exception other than InvalidRequestError.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import reprlib
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import wraps
from types import NoneType
from typing import Any, TypeVar

from asyncllm.errors import InvalidRequestError
from asyncllm.foreign_names import OUR_NAMES_BY_FOREIGN_NAME
from asyncllm.json_copier import JsonCopier

T = TypeVar("T")

MAX_INTEGER = 2**63 - 1

MAX_LIST_ITEMS = 2**19
"""Maximum number of items of a list of token ids: twice the size of the largest vocabularies. The
list is read while an event loop waits."""

MAX_PLAIN_DATA_VALUES, MAX_PLAIN_DATA_CHARACTERS = 2**13, 2**16
"""Maximum numbers of values and of characters of plain data. A number takes half a microsecond to
copy, while an event loop waits."""

MAX_PLAIN_DATA_DEPTH = 16
"""Maximum nesting depth of plain data, which is copied recursively."""

MAX_DURATION_SECONDS = 1e7
"""Maximum duration: 115 days, less than any platform's longest wait for a lock."""

_BUILTIN_COLLECTIONS = frozenset({list, set, frozenset, type({}.keys()), type({}.values())})

ErrorFactory = Callable[[str, object, str], Exception]
"""Function that makes an exception from a field's name, its value and the accepted values."""


class _ShortRepr(reprlib.Repr):
    """``reprlib.Repr`` that reads only the part of a value that it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 8

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # reprlib would sort all keys, which takes 0.1 s for a large request body.
        return super().repr_dict(dict(itertools.islice(x.items(), self.maxdict + 1)), level)

    def repr_set(self, x: set[Any], level: int) -> str:
        return super().repr_set(set(itertools.islice(x, self.maxset + 1)), level)

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        return super().repr_frozenset(frozenset(itertools.islice(x, self.maxset + 1)), level)

    def repr_instance(self, x: Any, level: int) -> str:
        # For a subclass of str or of a container, reprlib would make the whole repr.
        if isinstance(x, str):
            return self.repr_str(str.__getitem__(x, slice(self.maxstring + 1)), level)
        if isinstance(x, (bytes, bytearray)) and len(x) > self.maxother:
            x = x[: self.maxother]
        if isinstance(x, Mapping):
            return self.repr_dict(x, level)  # pyright: ignore[reportArgumentType]
        if isinstance(x, (list, tuple)):
            return self.repr_list(x, level)  # pyright: ignore[reportArgumentType]
        if isinstance(x, (Set, Sequence)) and not isinstance(x, (bytes, bytearray, range)):
            return f"<{type(x).__name__} of {len(x)} items>"
        return super().repr_instance(x, level)


_SHORT_REPR = _ShortRepr()


def describe(value: object) -> str:
    """Make a short ``repr`` of a value, for messages; never raises. Python's ``repr`` raises
    ValueError for an integer of more than 4300 digits, and an object's own ``__repr__`` may raise
    anything."""
    try:
        return str.__str__(
            _SHORT_REPR.repr(value)
        )  # A repr may be of a subclass of str, whose methods may raise.
    except BaseException:
        return f"<{type(value).__name__}>"


def describe_error(error: BaseException) -> str:
    """Make a text of an exception's type and full message; never raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return describe(error)


def as_plain_str(value: object) -> str | None:
    """Copy a text as a plain ``str``; None for anything but text. Methods of a subclass of ``str``
    would otherwise run on the engine thread."""
    return str.__str__(value) if isinstance(value, str) else None


def value_error(name: str, value: object, expected_text: str) -> InvalidRequestError:
    """Make the error of an invalid argument; the message quotes the value."""
    return InvalidRequestError(f"{name}={describe(value)}: expected {expected_text}", param=name)


def argument_error(name: str, problem: str) -> InvalidRequestError:
    """Make the error of an invalid argument; the message leaves out the value."""
    return InvalidRequestError(f"{name}: {problem}", param=name)


def _refuse(
    name: str,
    value: Any,
    expected_text: str,
    *,
    optional: bool = False,
    make_error: ErrorFactory = value_error,
) -> None:
    """Refuse a value, unless it is None and None is accepted."""
    if value is not None or not optional:
        raise make_error(name, value, expected_text + " or None" * optional)


def integer(name: str, value: Any, low: int, high: int = MAX_INTEGER, **options: Any) -> Any:
    """Check an int in ``[low, high]``."""
    result = _parse_integer(value, low, high)
    if result is None:
        _refuse(name, value, f"an integer from {low} to {high}", **options)
    return result


def _parse_integer(value: Any, low: int, high: int) -> int | None:
    if value is None or type(value) is bool:
        return None
    try:
        result = int(operator.index(value))
    except Exception:  # Comparing a tensor of several elements raises an error.
        return None
    return result if low <= result <= high else None


def number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    exclusive_low: bool = False,
    description: str = "a finite number",
    **options: Any,
) -> Any:
    """Check a float in ``[low, high]``, or in ``(low, high]`` if ``exclusive_low`` is set. Negative
    zero becomes zero."""
    result = math.nan
    if isinstance(value, numbers.Real) and type(value) is not bool:
        try:
            result = float(value) + 0.0
        except OverflowError:
            result = math.inf
    if low <= result <= high and not (exclusive_low and result == low):
        return result
    preposition = "above" if exclusive_low else "from"
    return _refuse(name, value, f"{description} {preposition} {low:g} to {high:g}", **options)


def numbers_in_range(name: str, values: Collection[Any], low: float, high: float) -> list[float]:
    """Check that all values are numbers in ``[low, high]``; returns them as floats."""
    # Plain numbers are checked together, in a twentieth of the time.
    if (
        values
        and set(map(type, values)) <= {int, float}
        # ``min`` and ``max`` may overlook a NaN, but no number.
        and low <= min(values)
        and max(values) <= high
        and not math.isnan(sum(values))
    ):
        return [value + 0.0 for value in values]
    return [number(name, value, low, high) for value in values]


def seconds(name: str, value: Any, **options: Any) -> Any:
    """Check a duration in seconds. If ``exclusive_low`` is set, 0 is refused too."""
    return number(
        name, value, 0, MAX_DURATION_SECONDS, description="a number of seconds", **options
    )


def boolean(name: str, value: Any, **options: Any) -> Any:
    kind = type(value)
    if kind is bool:
        return value
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    return _refuse(name, value, "true or false", **options)


def string(
    name: str,
    value: Any,
    *,
    allow_empty: bool = False,
    max_length: int = MAX_INTEGER,
    **options: Any,
) -> Any:
    """Check a text: it must be valid UTF-8, without lone surrogates.

    Args:
        max_length: maximum number of characters.
    """
    text = as_plain_str(value)
    if text is not None and len(text) > max_length:
        _refuse(name, text, f"at most {max_length} characters, not {len(text)}", **options)
    if text or (allow_empty and text is not None):
        with suppress(UnicodeEncodeError):
            text.encode()
            return text
    return _refuse(name, value, "a string" if allow_empty else "a non-empty string", **options)


def plain_data(name: str, value: Any, **options: Any) -> Any:
    """Copy a dict of plain data: None, booleans, finite numbers, 64-bit integers, text, lists, and
    dicts with text for keys."""
    copier = JsonCopier(
        MAX_PLAIN_DATA_VALUES,
        MAX_PLAIN_DATA_CHARACTERS,
        MAX_PLAIN_DATA_DEPTH,
        _convert_plain_scalar,
        scalar_types=frozenset({str, bool, NoneType}),
        require_text_keys=True,
    )
    with suppress(Exception):
        if isinstance(value, Mapping):
            copied = copier.copy(value)
            "".join(copier.texts).encode()
            return copied
    expected_text = (
        f"a dict of plain data, {MAX_PLAIN_DATA_DEPTH} deep, "
        f"{MAX_PLAIN_DATA_VALUES} values and {MAX_PLAIN_DATA_CHARACTERS} characters at most"
    )
    return _refuse(name, value, expected_text, **options)


def _convert_plain_scalar(value: Any) -> Any:
    # Plain numbers are checked in a fraction of the time of others.
    if type(value) is int and -(2**63) <= value < 2**64:
        return value
    if type(value) is float and math.isfinite(value):
        return value + 0.0  # Adding 0.0 turns -0.0 into 0.0.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return integer("", value, -(2**63), 2**64 - 1)
    return number("", value, -sys.float_info.max, sys.float_info.max)


def choice(name: str, value: Any, choices: Sequence[str], **options: Any) -> Any:
    text = as_plain_str(value)
    if text in choices:
        return text
    return _refuse(name, value, " or ".join(map(repr, choices)), **options)


def bounded_tuple(
    name: str, value: Any, expected_text: str, max_items: int = MAX_LIST_ITEMS, **options: Any
) -> Any:
    """Copy the items of a sequence or a set to a tuple; None gives an empty tuple. More than
    ``max_items`` items are refused; of an endless iterable, only ``max_items + 1`` are read."""
    is_text = isinstance(value, (str, bytes, bytearray, Mapping))
    found_items: Any = None
    if type(value) in _BUILTIN_COLLECTIONS and len(value) <= max_items:
        found_items = tuple(value)  # Several times as fast as ``islice``.
    elif value is None or type(value) is tuple:
        found_items = value or ()
    if found_items is None and not is_text and isinstance(value, Iterable):
        length = 0
        # ``len`` raises an error for an iterator, and for a length above 64 bits.
        with suppress(Exception):
            length = len(value)  # pyright: ignore[reportArgumentType]
        if length > max_items:
            return _refuse(name, value, f"at most {max_items} {expected_text}", **options)
        try:
            found_items = tuple(itertools.islice(value, max_items + 1))
        except Exception:  # As of an array without dimensions; the error becomes the context.
            return _refuse(name, value, expected_text, **options)
    if found_items is not None and len(found_items) <= max_items:
        return found_items
    return _refuse(
        name,
        value,
        expected_text if found_items is None else f"at most {max_items} {expected_text}",
        **options,
    )


def strings(
    name: str,
    value: Any,
    max_items: int = MAX_LIST_ITEMS,
    max_length: int = MAX_INTEGER,
    **options: Any,
) -> Any:
    """Check a sequence of at most ``max_items`` non-empty strings; returns a tuple.

    Args:
        max_length: maximum number of characters of a string.
    """
    expected_text = "a sequence of strings"
    if max_length < MAX_INTEGER:
        expected_text = f"strings of {max_length} characters at most"
    if value is None:
        return _refuse(name, value, expected_text, **options)
    texts = bounded_tuple(name, value, expected_text, max_items, **options)
    # Plain texts are checked together.
    if set(map(type, texts)) <= {str} and max(map(len, texts), default=0) <= max_length:
        with suppress(UnicodeEncodeError):
            # UTF-32 is made in half of the time of UTF-8.
            if all(text.isascii() or text.encode("utf-32") for text in texts) and all(texts):
                return texts
    if any(isinstance(text, str) and str.__len__(text) > max_length for text in texts):
        _refuse(name, texts, expected_text, **options)
    # ``optional`` concerns the field; its items may not be None.
    return tuple([string(name, text, **{**options, "optional": False}) for text in texts])


def token_ids(
    name: str,
    value: Any,
    vocab_size: int = MAX_INTEGER,
    max_items: int = MAX_LIST_ITEMS,
    *,
    unique: bool = False,
    **options: Any,
) -> Any:
    """Check a sequence of integers in ``[0, vocab_size)``; returns a tuple; None gives ().

    Args:
        unique: drop repeats.
    """
    expected_text = f"token ids, integers from 0 to {vocab_size - 1}"
    all_ids = bounded_tuple(name, value, expected_text, max_items, **options)
    # Read the list as few times as possible: callers wait while thousands of ids are checked.
    with suppress(Exception):
        kinds = list(map(type, all_ids))
        is_plain = kinds.count(int) == len(kinds)
        unsigned = array("Q", all_ids)  # OverflowError for a negative id.
        ids = all_ids if is_plain else tuple(unsigned)
        # Without a vocabulary the sum is enough, which no id exceeds.
        in_range = vocab_size == MAX_INTEGER and sum(ids) < vocab_size
        if (is_plain or bool not in kinds) and (in_range or max(ids, default=0) < vocab_size):
            is_unique = not unique or len(set(ids)) == len(ids)
            return ids if is_unique else tuple(dict.fromkeys(ids))
    invalid_ids = (one for one in all_ids if _parse_integer(one, 0, vocab_size - 1) is None)
    # ``optional`` concerns the field; its items may not be None.
    return _refuse(name, next(invalid_ids, value), expected_text, **{**options, "optional": False})


def validate_field(
    owner: Any, validator: Callable[..., Any], name: str, *limits: Any, **options: Any
) -> None:
    """Validate a field of a frozen dataclass, and store the plain value. The default is always
    accepted. None is accepted if it is the default, or if ``optional`` is True."""
    value, default = getattr(owner, name), owner.__dataclass_fields__[name].default
    if value is not default:
        options.setdefault("optional", default is None)
        object.__setattr__(owner, name, validator(name, value, *limits, **options))


def equal_json(left: Any, right: Any) -> bool:
    """Compare JSON values: 1 does not equal True, and a numpy array equals no value."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            equal_json(left[key], right[key]) for key in left
        )
    return bool(left == right)


def refuse_unknown_names(name_kind: str, names: Iterable[Any], known: Collection[str]) -> None:
    """Raise InvalidRequestError for an unknown name. If it is another library's name, the
    message has asyncllm's name for the same thing."""
    for name in names:
        if name not in known:
            name = f"{name:.80}" if isinstance(name, str) else describe(name)
            our_name = OUR_NAMES_BY_FOREIGN_NAME.get(name_kind, {}).get(name)
            hint = f", expected {our_name}"
            if our_name is None:
                hint = f" (there are {', '.join(sorted(known))})"
            raise argument_error(name, f"no such {name_kind}{hint}")


def refuse_unknown_fields(field_kind: str) -> Callable[[type[T]], type[T]]:
    """Make a dataclass refuse an unknown field as ``refuse_unknown_names`` does.

    Args:
        field_kind: what the fields are, for error messages.
    """

    def decorate(cls: type[T]) -> type[T]:
        fields: Any = cls.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
        original_init = cls.__init__

        @wraps(original_init)
        def init(self: T, *values: Any, **keywords: Any) -> None:
            if not keywords.keys() <= fields.keys():
                refuse_unknown_names(field_kind, keywords, fields)
            original_init(self, *values, **keywords)

        cls.__init__ = init
        return cls

    return decorate
