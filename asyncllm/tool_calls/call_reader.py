"""Call readers: parse the text of tool calls into names and arguments.

Text arrives in pieces, and the result does not depend on the cuts between pieces. If a text turns
out to be no call, all of the text is reported as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from asyncllm.tool_calls.delimiters import Delimiters, DelimiterScanner


class CallEvent(NamedTuple):
    """Event that a CallReader reports.

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

    events: list[CallEvent]

    def push(self, text: str) -> str | None:
        """Take the next text. Returns None until the region ends, then the text after it."""
        ...

    def finish(self) -> str:
        """End the region at the end of the output; returns the text after the region."""
        ...


class BufferedCallReader:
    """CallReader for a syntax other than JSON. It parses a region once the region is complete.

    Args:
        parse_calls: function from the region's text, delimiters included, to the names and
            arguments of its calls; it returns None if the text is no call.
        opening_delimiter: the delimiter before the region.
        closing_delimiters: delimiters that end the region; None if the region goes on to the end of
            the output.
    """

    def __init__(
        self,
        parse_calls: Callable[[str], Sequence[tuple[str, str]] | None],
        opening_delimiter: str,
        closing_delimiters: Delimiters | None,
    ) -> None:
        self.events: list[CallEvent] = []
        self._parse_calls = parse_calls
        self._scanner = None if closing_delimiters is None else DelimiterScanner(closing_delimiters)
        self._region_texts = [opening_delimiter]

    def push(self, text: str, is_last: bool = False) -> str | None:
        if self._scanner is None:
            self._region_texts.append(text)
            return None
        before, delimiter, rest = self._scanner.feed(text, is_last)
        self._region_texts.append(before)
        if delimiter is None:
            return None
        self._region_texts.append(delimiter.text)
        self._parse_buffered_calls()
        return rest

    def finish(self) -> str:
        rest = self.push("", is_last=True)
        if rest is None:
            self._parse_buffered_calls()
        return rest or ""

    def _parse_buffered_calls(self) -> None:
        raw = "".join(self._region_texts)
        calls = self._parse_calls(raw)
        if calls is None:
            self.events.append(CallEvent("text", raw))
            return
        for name, arguments in calls:
            self.events += (
                CallEvent("begin", name),
                CallEvent("arguments", arguments),
                CallEvent("done"),
            )
