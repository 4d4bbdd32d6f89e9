"""Call readers: parse the text of tool calls to names and arguments.

Text arrives in pieces, and the result does not depend on where they are cut. If a text turns out to
be no call, the whole of it is reported as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from asyncllm.tool_calls.delimiters import Delimiters, DelimiterScanner


class Event(NamedTuple):
    """Event of a CallReader.

    - "begin": a call begins; ``text`` is the tool's name.
    - "arguments": ``text`` is the next part of the arguments' JSON.
    - "done": the call is complete.
    - "text": ``text`` is no call.
    """

    kind: Literal["begin", "arguments", "done", "text"]
    text: str = ""


class CallReader(Protocol):
    """Parser of one region of an output: the calls after an opening delimiter.

    Attributes:
        events: events that the caller has not removed yet.
    """

    events: list[Event]

    def push(self, text: str) -> str | None:
        """Take the next text; returns None while the region goes on, then the text after it."""
        ...

    def finish(self) -> str:
        """End the region, because the output ends; returns the text after the region."""
        ...


class RegionCallReader:
    """CallReader for a syntax other than JSON. It parses a region once the region is complete.

    Args:
        parse: function from the region's text, delimiters included, to the names and arguments of
            its calls; it returns None if the text is no call.
        opening: the delimiter before the region.
        close: delimiters that end the region; None if it goes on to the end of the output.
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
        self._region_texts = [opening]

    def push(self, text: str, is_last: bool = False) -> str | None:
        if self._scanner is None:
            self._region_texts.append(text)
            return None
        before, delimiter, rest = self._scanner.feed(text, is_last)
        self._region_texts.append(before)
        if delimiter is None:
            return None
        self._region_texts.append(delimiter.text)
        self._parse_region()
        return rest

    def finish(self) -> str:
        rest = self.push("", is_last=True)
        if rest is None:
            self._parse_region()
        return rest or ""

    def _parse_region(self) -> None:
        raw = "".join(self._region_texts)
        calls = self._parse(raw)
        if calls is None:
            self.events.append(Event("text", raw))
            return
        for name, arguments in calls:
            self.events += (Event("begin", name), Event("arguments", arguments), Event("done"))
