"""Tracebacks that outlive what their frames refer to."""

from __future__ import annotations

import traceback


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
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]
