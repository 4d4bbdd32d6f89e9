"""any_of: a pattern of many literal texts, which takes no longer where there are more of them."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import groupby

_MAX_DEPTH = 64
"""Groups within groups: the compiler of patterns calls itself for each."""


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of ``texts`` that begins at a place; of none, it finds
    nothing. Alternatives share their beginnings (a radix tree), because ``re`` tries those of one
    group in turn: a text of a thousand "<" would be compared with each token that begins so."""
    return re.compile(_tree(sorted({text for text in texts if text}), 0) or r"(?!)")


def _tree(texts: list[str], depth: int) -> str:
    """The source for ``texts``, sorted and each once. An empty one among them ends where its group
    begins, and is tried behind those that go on."""
    if depth == _MAX_DEPTH:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    ends = [text for text in texts[:1] if not text]
    branches = []
    for _, group in groupby(texts[len(ends) :], key=lambda text: text[0]):
        alike = list(group)
        # Of sorted texts the first and the last differ earliest.
        shared = _shared(alike[0], alike[-1])
        rest = _tree([text[len(shared) :] for text in alike], depth + 1)
        branches.append(re.escape(shared) + (f"(?:{rest})" if rest else ""))
    return "|".join(branches + ends)


def _shared(first: str, last: str) -> str:
    """The beginning that two texts have in common."""
    if first == last:
        return first
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((i for i, (one, other) in pairs if one != other), len(first))]
