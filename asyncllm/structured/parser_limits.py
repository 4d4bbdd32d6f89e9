"""Limits of llguidance's parser, which meets them as an output is written: a grammar that is past
them is refused before.

They stay as llguidance has them. With four times as many alternatives a mask of 150,000 tokens
takes 100 ms and more, and every request of the batch waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any

from asyncllm.structured.grammar import GrammarError
from asyncllm.structured.json_schema import LLGUIDANCE, refuse_unenforced, subschemas
from asyncllm.structured.references import is_local, refuse_endless, resolve

MAX_ALTERNATIVES = 2000
"""Of what may come next (``LLParserLimits.max_items_in_row``)."""

CHARACTERS_PER_STATE = 512
MAX_STATES = 64
MAX_SECONDS = 1.0


def refuse_past_llguidance(schema: Any) -> None:
    """Raises GrammarError, which names it, for what llguidance does not enforce in a schema, what
    has no end, and what is past its limits."""
    refuse_unenforced(schema, LLGUIDANCE)
    refuse_endless(schema)
    refuse_many_properties(schema)


def refuse_many_properties(root: Any) -> None:
    """Raises GrammarError for a schema with an object of which too many properties may come next.
    Those that are left out add up: of 500 optional ones, the first may be any."""
    for schema in subschemas(root):
        if "$ref" in schema:
            continue  # what it leads to has its turn
        counts = list(_alternatives(schema, root))
        if sum(counts) > MAX_ALTERNATIVES:
            raise GrammarError(
                f"an object of which properties may be left out in so many ways that "
                f"{sum(counts)} alternatives come next, expected at most {MAX_ALTERNATIVES}: "
                "about 500 optional properties; required ones between them begin a new count"
            )


def _alternatives(schema: Mapping[str, Any], root: Any) -> Iterator[int]:
    """The parser's items where an object of each of the alternatives is open."""
    pending: list[Any] = [schema]
    seen: set[str] = set()
    while pending:
        one = pending.pop()
        if not isinstance(one, Mapping):
            continue
        pointer = one.get("$ref")
        if is_local(pointer) and pointer not in seen:
            seen.add(pointer)
            with suppress(LookupError):
                pending.append(resolve(pointer, root))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(among := one.get(keyword), list):
                pending += among
        if isinstance(one.get("properties"), Mapping):
            yield _items_of_object(one)


def _items_of_object(schema: Mapping[str, Any]) -> int:
    """As llguidance has them: optional properties are in four items each, in three if a required
    one follows, and in two behind a required one."""
    required = schema.get("required")
    needed = {name for name in required if isinstance(name, str)} if required else set[str]()
    others = 8 * (schema.get("additionalProperties", True) is not False)
    others += len(schema.get("patternProperties", ()))
    runs = [(n, len(list(run))) for n, run in groupby(schema["properties"], needed.__contains__)]
    found = [1]
    for i, (is_needed, length) in enumerate(runs):
        if not is_needed:
            leading = 4 * length - 1 + others if len(runs) == 1 else 3 * length + 1
            found.append(leading if i == 0 else 2 * length + others)
    return max(found)


def try_states(matcher: Any, mask_size: int, num_characters: int) -> None:
    """Raises GrammarError if the parser is at a limit in one of the first states of a grammar:
    the more of them are tried, the longer it is.

    Args:
        matcher: llguidance's, at the beginning; it is not moved.
        mask_size: bytes of the masks' part that is tokens of the vocabulary.
    """
    states = [matcher.deep_copy()]
    left = min(2 + num_characters // CHARACTERS_PER_STATE, MAX_STATES)
    until = time.monotonic() + MAX_SECONDS
    while states and left:
        following = []
        for state in states[:left]:
            if time.monotonic() > until:
                return
            left -= 1
            mask = state.compute_bitmask()
            _check_limits(state)
            for token_id in _some_tokens(mask[:mask_size]):
                tried = state.deep_copy()
                tried.consume_token(token_id)
                _check_limits(tried)
                if not tried.is_stopped():
                    following.append(tried)
        states = following


def _check_limits(matcher: Any) -> None:
    if matcher.is_error() and matcher.stop_reason() != "NoExtensionBias":
        raise GrammarError(explain(matcher.get_error()))


def _some_tokens(mask: bytes) -> list[int]:
    """The first token of each of some bytes of a mask, apart from each other."""
    found = [8 * i + (byte & -byte).bit_length() - 1 for i, byte in enumerate(mask) if byte]
    return found[:: max(1, len(found) // 4)][:4]


def explain(error: str) -> str:
    """llguidance's words in one line, without the grammar that it was found in."""
    if error.startswith("NoExtensionBias"):
        return "admits nothing"
    words = error.partition("\n1 | ")[0].replace("<non-verbose/>", "").split()
    return " ".join(words)[:500]
