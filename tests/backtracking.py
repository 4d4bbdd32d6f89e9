"""Steps of a backtracking search for a pattern, counted in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

# The parser of patterns has no public name.
_PARSER: Any = re._parser  # type: ignore[attr-defined]
_GROUPS = ("BRANCH", "SUBPATTERN", "ASSERT", "MAX_REPEAT")


def count_search_steps(pattern: str, text: str) -> int:
    """Steps of a search for ``pattern`` in ``text``, each alternative tried in its order.

    A repeat of anything but single characters is refused, besides an optional group: it may take
    exponential time.
    """
    without_names = re.sub(r"\(\?P<\w+>", "(?:", pattern)
    nodes = list(_PARSER.parse(without_names, re.DOTALL))
    search = _Search(text)
    for start in range(len(text) + 1):
        if next(search.ends(nodes, start), None) is not None:
            break
    return search.num_steps


class _Search:
    def __init__(self, text: str) -> None:
        self.num_steps = 0
        self._text = text

    def ends(self, nodes: Sequence[Any], start: int) -> Iterator[int]:
        """Ends of the matches of a sequence of nodes, in the order of a backtracking search."""
        for i, (opcode, argument) in enumerate(nodes):
            self.num_steps += 1
            if str(opcode) in _GROUPS:
                for end in self._group_ends(str(opcode), argument, start):
                    yield from self.ends(nodes[i + 1 :], end)
                return
            if not self._matches_character(opcode, argument, start):
                return
            start += 1
        yield start

    def _group_ends(self, kind: str, argument: Any, start: int) -> Iterator[int]:
        if kind == "BRANCH":
            for branch in argument[1]:
                yield from self.ends(list(branch), start)
        elif kind == "SUBPATTERN":
            yield from self.ends(list(argument[-1]), start)
        elif kind == "ASSERT":
            if next(self.ends(list(argument[1]), start), None) is not None:
                yield start
        elif kind == "MAX_REPEAT" and argument[:2] == (0, 1):
            yield from self.ends(list(argument[2]), start)
            yield start
        else:
            low, high, (body,) = argument
            end = start
            while end - start < high and self._matches_character(body[0], body[1], end):
                end += 1
            self.num_steps += end - start
            for shorter in range(end, start + low - 1, -1):
                self.num_steps += 1
                yield shorter

    def _matches_character(self, opcode: Any, argument: Any, position: int) -> bool:
        if position == len(self._text):
            return False
        character, kind = self._text[position], str(opcode)
        if kind == "IN":
            is_negated = str(argument[0][0]) == "NEGATE"
            return is_negated != any(
                self._matches_character(item[0], item[1], position)
                for item in argument[is_negated:]
            )
        if kind == "CATEGORY":
            is_space = str(argument) == "CATEGORY_SPACE"
            assert is_space or str(argument) == "CATEGORY_WORD"
            return re.match(r"\s" if is_space else r"\w", character) is not None
        assert kind in ("LITERAL", "NOT_LITERAL"), f"{kind} is not counted"
        return (chr(argument) == character) == (kind == "LITERAL")
