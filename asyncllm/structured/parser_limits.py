"""Limits of llguidance's parser, which meets them as an output is written: a grammar that is past
them in one of its first states is refused before, and one further in ends its own request.

They stay as llguidance has them. With four times as many alternatives a mask of 150,000 tokens
takes 100 ms and more, and every request of the batch waits for it.
"""

from __future__ import annotations

import time
from typing import Any

from asyncllm.structured.grammar import GrammarError
from asyncllm.structured.json_schema import LLGUIDANCE, refuse_unenforced
from asyncllm.structured.references import refuse_endless

CHARACTERS_PER_STATE = 512
MAX_STATES = 64
MAX_SECONDS = 1.0


def refuse_past_llguidance(schema: Any) -> None:
    """Raises GrammarError, which names it, for what llguidance does not enforce in a schema, and
    for what has no end."""
    refuse_unenforced(schema, LLGUIDANCE)
    refuse_endless(schema)


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
