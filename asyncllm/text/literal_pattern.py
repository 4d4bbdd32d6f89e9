"""literal_pattern: makes a regular expression that finds many literal texts in linear time."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from itertools import groupby

_MAX_GROUP_DEPTH = 64
"""Maximum depth of nested groups, which ``re`` compiles recursively."""


def literal_pattern(texts: Collection[str]) -> re.Pattern[str]:
    """Pattern that matches the longest of ``texts`` at each position; nothing if there are none.

    Common prefixes are factored out (a radix tree), because ``re`` tries alternatives one by one:
    at each of a thousand "<" it would try every text that begins with "<".
    """
    return re.compile(_trie_pattern(sorted({text for text in texts if text}), 0) or r"(?!)")


def _trie_pattern(sorted_texts: list[str], depth: int) -> str:
    """Regular expression of a trie of distinct texts, which tries longer texts first."""
    if depth == _MAX_GROUP_DEPTH:
        return "|".join(map(re.escape, sorted(sorted_texts, key=len, reverse=True)))
    ends = [text for text in sorted_texts[:1] if not text]
    branches = []
    for _, group in groupby(sorted_texts[len(ends) :], key=lambda text: text[0]):
        texts = list(group)
        # The prefix that the first and last of sorted texts have in common is common to all.
        prefix = os.path.commonprefix([texts[0], texts[-1]])  # noqa: RUF071 (of characters)
        rest = _trie_pattern([text[len(prefix) :] for text in texts], depth + 1)
        branches.append(re.escape(prefix) + (f"(?:{rest})" if rest else ""))
    return "|".join(branches + ends)
