"""Tracebacks of exceptions that are kept, without the objects that their frames keep alive."""

from __future__ import annotations

import traceback

_ATTRIBUTES = [vars(BaseException)[name] for name in ("__traceback__", "__cause__", "__context__")]


def clear_frames(error: BaseException) -> None:
    """Clears the local variables of the frames that ``error``, and what led to it, came
    through; those of frames that still run stay. File names and lines are kept."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        # Past the attributes of a class of the application's, which may raise.
        tb, *causes = (one.__get__(current) for one in _ATTRIBUTES)
        traceback.clear_frames(tb)
        pending += causes
