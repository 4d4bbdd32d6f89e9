"""Delimiters: finds delimiters in text that arrives in pieces, as soon as they are complete."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_DELIMITER_CHARACTERS = 256
"""Maximum number of characters of a delimiter; a longer match is plain text. Text that may become
a delimiter is searched again with each piece."""

_CANDIDATE_STARTING_CHARACTERS = string.printable
"""Characters tried as a delimiter's first character, besides the characters of its pattern."""

_PRIVATE_USE_CHARACTER = "\U000f1234"
"""Private-use character, which occurs in no delimiter. A pattern that can begin with it can
probably begin with any character."""


class DelimiterMatch(NamedTuple):
    """Delimiter found in a text: its name, the matched text, and the named groups."""

    name: str
    text: str
    captures: Mapping[str, str]


class Delimiters:
    """Compiled patterns of delimiters; shared by all outputs.

    Args:
        patterns: a name and a pattern for each delimiter: a list of alternative literals, or a
            regular expression.
    """

    def __init__(self, patterns: Sequence[tuple[str, list[str] | str]]) -> None:
        import regex  # Import ``regex`` here, because its import takes 15 ms.

        self.patterns: list[tuple[str, Any, bool]] = []
        starters: set[str] | None = set()
        for name, pattern in patterns:
            if isinstance(pattern, list):
                literal = not any(a != b and a.startswith(b) for a in pattern for b in pattern)
                source = "|".join(map(regex.escape, sorted(pattern, key=len, reverse=True)))
            else:
                literal, source = False, pattern
            compiled = regex.compile(source, regex.DOTALL)
            self.patterns.append((name, compiled, literal))
            characters = _starting_characters(compiled, source)
            starters = None if starters is None or characters is None else starters | characters
        self._starting_characters = None if starters is None else frozenset(starters)

    def may_begin_in(self, text: str) -> bool:
        return self._starting_characters is None or not self._starting_characters.isdisjoint(text)

    def match(self, text: str, *, is_last: bool = False) -> tuple[Any, bool]:
        """Match a delimiter at the beginning of ``text``.

        Args:
            is_last: whether this is the last text.

        Returns:
            ``(match, pending)``. ``match`` is None if nothing matches, or if later text could
            change the match. In the second case ``pending`` is true.
        """
        is_last = is_last or len(text) > MAX_DELIMITER_CHARACTERS
        text = text[:MAX_DELIMITER_CHARACTERS]
        pending = False
        for _, pattern, literal in self.patterns:
            match = pattern.match(text, partial=not is_last)
            if match is None:
                continue
            if is_last or (not match.partial and (literal or match.end() < len(text))):
                return match, False
            pending = True
        return None, pending


def _starting_characters(pattern: Any, source: str) -> set[str] | None:
    """Characters that can begin a match; None for any character."""

    def can_begin_with(character: str) -> bool:
        match = pattern.match(character, partial=True)
        return match is not None and (match.partial or match.end() > 0)

    if can_begin_with(_PRIVATE_USE_CHARACTER):
        return None
    return {c for c in {*_CANDIDATE_STARTING_CHARACTERS, *source} if can_begin_with(c)}


def literals_or_pattern(field: Mapping[str, Any], side: str) -> list[str] | str | None:
    """Delimiter of a response template's field: a list of literals, or a pattern; None if absent.

    Args:
        side: "open" or "close".
    """
    value = field.get(side, field.get(f"{side}_pattern"))
    return [value] if side in field and isinstance(value, str) else value


class DelimiterScanner:
    """Finder of delimiters in one output, with the semantics of transformers' ResponseParser.

    The earliest match wins; among matches at the same place, the longest wins. Text is held back
    only while it may become a match, or is a match that more text could change.

    Most pieces contain no character that can begin a delimiter, and are returned at once. Only
    held-back text is stored, so the cost of a piece does not grow with the output.
    """

    __slots__ = ("_delimiters", "_held_text")

    def __init__(self, delimiters: Delimiters) -> None:
        self._delimiters = delimiters
        self._held_text = ""

    def feed(self, text: str, is_last: bool = False) -> tuple[str, DelimiterMatch | None, str]:
        """Take a piece of text.

        Args:
            is_last: whether this is the last text.

        Returns:
            If there is a delimiter: the text before it, the delimiter, and the text after it, which
            the caller must feed again. If there is none: the text that is not held back, None, "".
        """
        if not self._held_text and not self._delimiters.may_begin_in(text):
            return text, None, ""
        buffer, self._held_text = self._held_text + text, ""
        position = 0
        while True:
            best, hold_from = self._scan(buffer, position, is_last)
            if best is not None and len(best[1][0]) > MAX_DELIMITER_CHARACTERS:
                position = best[1].start() + 1
            elif best is not None:
                name, match = best
                captures = {k: v for k, v in match.groupdict().items() if v is not None}
                delimiter = DelimiterMatch(name, match[0], captures)
                return buffer[: match.start()], delimiter, buffer[match.end() :]
            elif len(buffer) - hold_from > MAX_DELIMITER_CHARACTERS:
                position = hold_from + 1
            else:
                self._held_text = buffer[hold_from:]
                return buffer[:hold_from], None, ""

    def _scan(
        self, buffer: str, position: int, is_last: bool
    ) -> tuple[tuple[str, Any] | None, int]:
        """Search ``buffer`` from ``position`` on.

        Returns:
            Name and match of the first delimiter, if no earlier text may become one; and the
            position of the first text that may become one.
        """
        best: tuple[str, Any] | None = None
        hold_from = end = len(buffer)
        for name, pattern, literal in self._delimiters.patterns:
            match = pattern.search(buffer, position, partial=not is_last)
            if match is None:
                continue
            if not is_last and (match.partial or (match.end() == end and not literal)):
                hold_from = min(hold_from, match.start())
            elif best is None or _match_rank(match) < _match_rank(best[1]):
                best = (name, match)
        if best is not None and best[1].start() >= hold_from:
            best = None
        return best, hold_from


def _match_rank(match: Any) -> tuple[int, int]:
    return match.start(), -match.end()
