"""try_states: checks a grammar against the limits of llguidance's parser.

The parser meets its limits while an output is written. A grammar that exceeds them in one of its
first states is refused before; one that does so later ends its own request.

The limits are llguidance's defaults. With four times as many alternatives a mask of 150,000 tokens
would take 100 ms and more, and every request of the batch would wait.
"""

from __future__ import annotations

import time
from typing import Any

from asyncllm.structured.grammar import GrammarError
from asyncllm.structured.json_schema import LLGUIDANCE_KEYWORDS, refuse_unenforced
from asyncllm.structured.references import refuse_endless

CHARACTERS_PER_STATE = 512
MAX_STATES = 64
MAX_SECONDS = 1.0


def refuse_past_llguidance(schema: Any) -> None:
    """Raises GrammarError for a keyword that llguidance does not enforce, or an endless schema."""
    refuse_unenforced(schema, LLGUIDANCE_KEYWORDS)
    refuse_endless(schema)


def try_states(matcher: Any, mask_size: int, num_characters: int) -> None:
    """Raises GrammarError if the parser exceeds a limit in one of the grammar's first states. More
    states are tried for a longer grammar.

    Args:
        matcher: llguidance's matcher in its initial state, which is not changed.
        mask_size: leading bytes of a mask that belong to the vocabulary.
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
    """Up to four allowed tokens of a mask, spread over the vocabulary."""
    found = [8 * i + (byte & -byte).bit_length() - 1 for i, byte in enumerate(mask) if byte]
    return found[:: max(1, len(found) // 4)][:4]


def explain(error: str) -> str:
    """llguidance's error message in one line, without the grammar."""
    if error.startswith("NoExtensionBias"):
        return "admits nothing"
    words = error.partition("\n1 | ")[0].replace("<non-verbose/>", "").split()
    return " ".join(words)[:500]
