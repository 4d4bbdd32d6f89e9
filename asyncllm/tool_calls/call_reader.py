"""Readers of tool calls: a call's text, from its opening on, to its name and arguments.

Each takes text in pieces, and what it makes of it does not depend on where they are cut. What turns
out to be no call is handed back as text, whole, and so is what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from asyncllm.tool_calls.delimiters import Delimiters, DelimiterScanner


class Event(NamedTuple):
    """ "begin" with a tool's name, "arguments" with more of their JSON text, "done", or "text"
    that is no call."""

    kind: Literal["begin", "arguments", "done", "text"]
    text: str = ""


class CallReader(Protocol):
    """Reads one region of calls.

    Attributes:
        events: what was read, to be taken by the caller.
    """

    events: list[Event]

    def push(self, text: str) -> str | None:
        """Takes more text. None if all of it belongs here; else the region has ended, and this
        is what follows it."""
        ...

    def finish(self) -> str:
        """Ends the region with the output; returns what does not belong to it."""
        ...


class RegionCallReader:
    """Calls in any other syntax, which ``parse`` reads when the region is complete.

    Args:
        parse: the text of a region, delimiters included, to its calls as names and arguments; None
            for what is no call.
        close: None where only the end of the output ends the region.
    """

    def __init__(
        self,
        parse: Callable[[str], Sequence[tuple[str, str]] | None],
        opening: str,
        close: Delimiters | None,
    ) -> None:
        self.events: list[Event] = []
        self._parse = parse
        self._scanner = None if close is None else DelimiterScanner(close)
        self._raw = [opening]

    def push(self, text: str) -> str | None:
        return self._push(text, last=False)

    def _push(self, text: str, last: bool) -> str | None:
        if self._scanner is None:
            self._raw.append(text)
            return None
        before, found, rest = self._scanner.feed(text, last)
        self._raw.append(before)
        if found is None:
            return None
        self._raw.append(found.text)
        self._end()
        return rest

    def finish(self) -> str:
        rest = self._push("", last=True)
        if rest is None:
            self._end()
        return rest or ""

    def _end(self) -> None:
        raw = "".join(self._raw)
        calls = self._parse(raw)
        if calls is None:
            self.events.append(Event("text", raw))
            return
        for name, arguments in calls:
            self.events += (Event("begin", name), Event("arguments", arguments), Event("done"))
