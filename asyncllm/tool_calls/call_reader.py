"""Call readers: parse the text of a tool call to its name and arguments.

Text arrives in pieces, and the result does not depend on where they are cut. A text that turns out
to be no call is returned whole, as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from asyncllm.tool_calls.delimiters import Delimiters, DelimiterScanner


class Event(NamedTuple):
    """Event of parsing: "begin" with a tool's name, "arguments" with more of their JSON text,
    "done", or "text" that is no call."""

    kind: Literal["begin", "arguments", "done", "text"]
    text: str = ""


class CallReader(Protocol):
    """Parser of one region of calls, which an opening delimiter begins.

    Attributes:
        events: parsed events, which the caller removes.
    """

    events: list[Event]

    def push(self, text: str) -> str | None:
        """Take more text. Returns None while the region goes on; else the text after its end."""
        ...

    def finish(self) -> str:
        """End the region at the end of the output; returns the text after the region."""
        ...


class RegionCallReader:
    """Reader of calls in a syntax other than JSON, which ``parse`` parses once the region is
    complete.

    Args:
        parse: converts a region's text, delimiters included, to names and arguments of its calls;
            None if it is no call.
        close: delimiters that end the region; None if only the end of the output does.
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

    def push(self, text: str, last: bool = False) -> str | None:
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
        rest = self.push("", last=True)
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
