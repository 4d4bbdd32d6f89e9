"""Arguments whose own methods raise, as numbers, texts and containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def _fails(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def _failing(base: type, *names: str) -> Any:
    return type(f"Failing{base.__name__}", (base,), dict.fromkeys(names, _fails))


class _Mapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return _fails()

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        yield "json"


_NUMBER = """__float__ __int__ __index__ __add__ __radd__ __le__ __ge__ __lt__ __gt__ __eq__
__hash__ __bool__ __repr__ __str__ __trunc__""".split()
_TEXT = """encode __str__ __repr__ __eq__ __hash__ __len__ __contains__ strip lstrip startswith
__format__ __iter__ __getitem__ partition""".split()
_DICT = """items keys values get __iter__ __getitem__ __contains__ __len__ __eq__ __repr__ copy
__bool__""".split()
_LIST = "__iter__ __len__ __getitem__ __eq__ __repr__ copy __bool__".split()


def hostile() -> dict[str, Any]:
    odd = _failing(object, "__getattribute__", "__repr__", "__eq__", "__hash__", "__bool__")()
    return {
        "float": _failing(float, *_NUMBER)(0.5),
        "integer": _failing(int, *_NUMBER)(1),
        "text": _failing(str, *_TEXT)("a"),
        "dict": _failing(dict, *_DICT)({"json": {"type": "null"}, "a": 1}),
        "dict of items": _failing(dict, "items", "values")({"json": {"type": "null"}}),
        "list": _failing(list, *_LIST)([1]),
        "tuple": _failing(tuple, *_LIST)((1,)),
        "mapping": _Mapping(),
        "object": odd,
        "of integers": [_failing(int, *_NUMBER)(1)],
        "of texts": [_failing(str, *_TEXT)("a")],
        "of dicts": [_failing(dict, *_DICT)({"role": "user", "content": "x"})],
        "of objects": [odd],
        "schema": {"json": _failing(dict, *_DICT)({"type": "null"})},
        "schema within": {"json": {"properties": _failing(dict, "items", "values")({"a": {}})}},
        "choice": {"choice": [_failing(str, *_TEXT)("a"), _failing(str, *_TEXT)("b")]},
        "regex": {"regex": _failing(str, *_TEXT)("a")},
        "keys": {1: 2},
        "tokens": {7: _failing(float, *_NUMBER)(0.5)},
        "tool": [{"type": "function", "function": _failing(dict, *_DICT)({"name": "f"})}],
        "tool name": [{"type": "function", "function": {"name": _failing(str, *_TEXT)("f")}}],
        "content": [{"role": "user", "content": _failing(str, *_TEXT)("f")}],
    }
