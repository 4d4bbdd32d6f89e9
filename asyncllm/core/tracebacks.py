"""clear_frames: frees the objects that a kept exception's traceback keeps alive."""

from __future__ import annotations

import traceback

_EXCEPTION_LINKS = [
    vars(BaseException)[name] for name in ("__traceback__", "__cause__", "__context__")
]


def clear_frames(error: BaseException) -> None:
    """Clear the local variables in the tracebacks of ``error`` and its causes. Running frames keep
    their variables; file names and lines stay."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        # Read the attributes by BaseException's own descriptors: a subclass may override them, and
        # raise.
        tb, *causes = (descriptor.__get__(current) for descriptor in _EXCEPTION_LINKS)
        traceback.clear_frames(tb)
        pending += causes
