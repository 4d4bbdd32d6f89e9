"""Functions that free the objects that a stored exception's traceback keeps alive."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

_TRACEBACK, _CAUSE, _CONTEXT, _ATTRIBUTES = (
    vars(BaseException)[name] for name in ("__traceback__", "__cause__", "__context__", "__dict__")
)
"""BaseException's own descriptors: a subclass may override the attributes with code that raises or
never returns."""

_MAX_NOTE_FRAMES = 16
"""Maximum number of a traceback's frames in a note; the innermost frames are shown."""


def clear_frames(error: BaseException) -> None:
    """Clear the local variables in the tracebacks of ``error`` and its causes. Running frames keep
    their variables; file names and lines stay."""
    for current in _exception_chain(error):
        traceback.clear_frames(_TRACEBACK.__get__(current))


def replace_tracebacks_by_note(error: BaseException) -> None:
    """Replace the tracebacks of ``error`` and its causes by a note that has their lines.

    ``clear_frames`` is not enough. A frame refers to its caller, and a frame that has ended keeps
    its variables while something refers to it. So a traceback also keeps alive the variables of its
    frames' callers: the step, the requests in it and the engine.
    """
    lines: list[str] = []
    for current in _exception_chain(error):
        tb = _TRACEBACK.__get__(current)
        if tb is not None:
            summary = traceback.StackSummary.extract(traceback.walk_tb(tb), limit=-_MAX_NOTE_FRAMES)
            lines += [f"{type(current).__name__} was raised in:\n", *summary.format()]
            _TRACEBACK.__set__(current, None)
    note = "".join(lines).rstrip()
    notes = _ATTRIBUTES.__get__(error).setdefault("__notes__", [])
    if note and type(notes) is list and not any(type(one) is str and one == note for one in notes):
        notes.append(note)


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an exception, its causes and contexts."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending += _CAUSE.__get__(current), _CONTEXT.__get__(current)
