"""try_states: checks a grammar against the limits of llguidance's parser.

The parser meets its limits while an output is written. A grammar that exceeds them in one of its
first states is refused before; one that does so later ends its own request.

The limits count work and no time, so that a request's result does not depend on its company. They
are below llguidance's defaults, and above all that schemas of practice take: a row costs the square
of its items, and an ambiguous grammar has more of them with each token.
"""

from __future__ import annotations

from typing import Any

from asyncllm.structured.grammar import GrammarError
from asyncllm.structured.json_schema import LLGUIDANCE_KEYWORDS, refuse_unenforced
from asyncllm.structured.references import refuse_endless
from asyncllm.structured.spec import StructuredOutputs

CHARACTERS_PER_STATE = 512
MAX_STATES = 64

MAX_ITEMS = 16_000
"""Most items of the parser that one mask makes: about 6 ms."""

MAX_LEXER_FUEL = 30_000
"""Most fuel of the lexer that one mask takes: about 2 ms."""

MAX_ITEMS_OF_SCHEMA = 1000
"""Most items after one token of a schema, whose brackets keep them from growing: 0.5 ms."""

MAX_ITEMS_OF_GRAMMAR = 256
"""Most items after one token of a caller's own rules, which may be ambiguous: 0.3 ms. The costs of
ambiguous rules grow with the cube."""


def max_items_in_row(spec: StructuredOutputs) -> int:
    """Most items that the parser may have after a token, which is what accepting it costs."""
    # Repetitions within repetitions are what can be ambiguous in a structural tag.
    nested = spec.kind == "structural_tag" and spec.text.count('"tags_with_separator"') > 1
    return MAX_ITEMS_OF_GRAMMAR if nested or spec.kind == "grammar" else MAX_ITEMS_OF_SCHEMA


def refuse_past_llguidance(schema: Any) -> None:
    """Raise GrammarError for a keyword that llguidance does not enforce, or an endless schema."""
    refuse_unenforced(schema, LLGUIDANCE_KEYWORDS)
    refuse_endless(schema)


def try_states(matcher: Any, mask_size: int, num_characters: int) -> None:
    """Raise GrammarError if the parser exceeds a limit in one of the grammar's first states. More
    states are tried for a longer grammar.

    Args:
        matcher: llguidance's matcher in its initial state, which is not changed.
        mask_size: leading bytes of a mask that belong to the vocabulary.
    """
    states = [matcher.deep_copy()]
    left = min(2 + num_characters // CHARACTERS_PER_STATE, MAX_STATES)
    while states and left:
        following = []
        for state in states[:left]:
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
