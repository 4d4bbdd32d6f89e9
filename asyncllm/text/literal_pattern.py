"""literal_pattern: makes a regular expression that finds many literal texts in linear time."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from itertools import groupby

_MAX_DEPTH = 64
"""Maximum depth of nested groups, which ``re`` compiles recursively."""


def literal_pattern(texts: Collection[str]) -> re.Pattern[str]:
    """Pattern that matches the longest of ``texts`` at each position; nothing if there are none.

    Common prefixes are factored out (a radix tree), because ``re`` tries alternatives one by one:
    at each of a thousand "<" it would try every text that begins with "<".
    """
    return re.compile(_tree_source(sorted({text for text in texts if text}), 0) or r"(?!)")


def _tree_source(texts: list[str], depth: int) -> str:
    """Source of a pattern for sorted, distinct ``texts``. Longer texts are tried before shorter
    ones."""
    if depth == _MAX_DEPTH:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    ends = [text for text in texts[:1] if not text]
    branches = []
    for _, group in groupby(texts[len(ends) :], key=lambda text: text[0]):
        alike = list(group)
        # The prefix that the first and last of sorted texts have in common is common to all.
        shared = os.path.commonprefix([alike[0], alike[-1]])  # noqa: RUF071 (of characters)
        rest = _tree_source([text[len(shared) :] for text in alike], depth + 1)
        branches.append(re.escape(shared) + (f"(?:{rest})" if rest else ""))
    return "|".join(branches + ends)
