"""Exceptions that cannot be printed."""

from __future__ import annotations

from typing import Any


def stop(*args: Any) -> Any:
    raise SystemExit("on purpose")


def raises(kind: type[BaseException]) -> Any:
    def method(self: Any, *args: Any) -> Any:
        raise kind("on purpose")

    return method


class Text(str):
    __slots__ = ()
    __str__ = __format__ = __len__ = stop  # pyright: ignore[reportAssignmentType]


UNPRINTABLE: dict[str, Any] = {
    "str": type("Odd", (Exception,), {"__str__": raises(ValueError)}),
    "repr": type("Odd", (Exception,), dict.fromkeys(("__str__", "__repr__"), raises(SystemExit))),
    "interrupt": type("Odd", (Exception,), {"__str__": raises(KeyboardInterrupt)}),
    "text": type("Odd", (Exception,), dict.fromkeys(("__str__", "__repr__"), lambda _: Text("x"))),
    "cause": type("Odd", (Exception,), {"__cause__": property(stop)}),
    "traceback": type("Odd", (Exception,), {"__traceback__": property(stop)}),
    "class": type("Odd", (Exception,), {"__class__": property(stop)}),
    "attributes": type("Odd", (Exception,), {"__getattribute__": stop}),
}
