"""Delimiters: patterns found in text that arrives in pieces, as soon as they are certain."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_LENGTH = 4096
"""Characters of a delimiter. What may become a longer one is text."""

_SAMPLES = string.printable
# In no class that a pattern lists, so a pattern that accepts it accepts about anything.
_ODD = "\U000f1234"


class Found(NamedTuple):
    """A delimiter: its name, the text that matched, the named groups in it."""

    name: str
    text: str
    captures: Mapping[str, str]


class Delimiters:
    """Patterns to look for, compiled; shared by all outputs.

    Args:
        patterns: pairs of a name and literals or a pattern, as ``literals_or_pattern`` gives them.
    """

    def __init__(self, patterns: Sequence[tuple[str, list[str] | str]]) -> None:
        import regex  # takes 15 ms, and few processes need it

        self.patterns: list[tuple[str, Any, bool]] = []
        starters: set[str] | None = set()
        for name, given in patterns:
            if isinstance(given, list):
                literal = not any(a != b and a.startswith(b) for a in given for b in given)
                source = "|".join(map(regex.escape, sorted(given, key=len, reverse=True)))
            else:
                literal, source = False, given
            compiled = regex.compile(source, regex.DOTALL)
            self.patterns.append((name, compiled, literal))
            found = _starters(compiled, source)
            starters = None if starters is None or found is None else starters | found
        self._starters = None if starters is None else frozenset(starters)

    def may_begin_in(self, text: str) -> bool:
        return self._starters is None or not self._starters.isdisjoint(text)

    def match(self, text: str, *, last: bool = False) -> tuple[Any, bool]:
        """The match at the beginning, if it is certain, and whether there may yet be one."""
        pending = False
        for _, pattern, literal in self.patterns:
            match = pattern.match(text, partial=not last)
            if match is None:
                continue
            if last or (not match.partial and (literal or match.end() < len(text))):
                return match, False
            pending = True
        return None, pending


def _starters(pattern: Any, source: str) -> set[str] | None:
    """Characters that a match may begin with; None for any."""

    def begins(character: str) -> bool:
        match = pattern.match(character, partial=True)
        return match is not None and (match.partial or match.end() > 0)

    return None if begins(_ODD) else {c for c in {*_SAMPLES, *source} if begins(c)}


def literals_or_pattern(field: Mapping[str, Any], side: str) -> list[str] | str | None:
    """``open`` or ``close`` of a response template's field; None without one."""
    value = field.get(side, field.get(f"{side}_pattern"))
    return [value] if side in field and isinstance(value, str) else value


class DelimiterScanner:
    """Finds the delimiters of one output, with the semantics of transformers' ResponseParser:
    the earliest match wins, of those the longest; a match at the end of what is there waits if
    more text could change it; and what can still become a match is held back, nothing else.

    Most pieces hold nothing that a delimiter begins with, and are handed out as they are. What
    is held is kept, and nothing before it, so the cost of a piece does not grow with the output.
    """

    __slots__ = ("_delimiters", "_held")

    def __init__(self, delimiters: Delimiters) -> None:
        self._delimiters = delimiters
        self._held = ""

    def feed(self, text: str, last: bool = False) -> tuple[str, Found | None, str]:
        """The text before the first delimiter, the delimiter, and the text behind it, which is
        to be fed again. Without one, what is certainly text.

        Args:
            last: no more text will come.
        """
        if not self._held and not self._delimiters.may_begin_in(text):
            return text, None, ""
        buffer, self._held = self._held + text, ""
        position = 0
        while True:
            best, hold = self._scan(buffer, position, last)
            if best is not None and len(best[1][0]) > MAX_LENGTH:
                position = best[1].start() + 1
            elif best is not None:
                name, match = best
                captures = {k: v for k, v in match.groupdict().items() if v is not None}
                found = Found(name, match[0], captures)
                return buffer[: match.start()], found, buffer[match.end() :]
            elif len(buffer) - hold > MAX_LENGTH:
                position = hold + 1
            else:
                self._held = buffer[hold:]
                return buffer[:hold], None, ""

    def _scan(self, buffer: str, position: int, last: bool) -> tuple[tuple[str, Any] | None, int]:
        """The first certain match, and where the first uncertain one begins."""
        best: tuple[str, Any] | None = None
        hold = end = len(buffer)
        for name, pattern, literal in self._delimiters.patterns:
            match = pattern.search(buffer, position, partial=not last)
            if match is None:
                continue
            if not last and (match.partial or (match.end() == end and not literal)):
                hold = min(hold, match.start())
            elif best is None or _rank(match) < _rank(best[1]):
                best = (name, match)
        if best is not None and best[1].start() >= hold:
            best = None
        return best, hold


def _rank(match: Any) -> tuple[int, int]:
    return match.start(), -match.end()
