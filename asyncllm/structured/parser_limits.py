"""Limits of llguidance's parser, and a check of a grammar's first states against them.

The parser applies the limits at each token of an output. A grammar that exceeds them in one of its
first states is refused when it is compiled; one that exceeds them later ends its request.

The limits count work, not time, so that a request's result does not depend on the load. They are
below llguidance's defaults, and above the needs of practical schemas. The limits are needed because
a step of the Earley parser takes time quadratic in its items, and the items of an ambiguous grammar
grow with each token.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from asyncllm.structured.grammar import GrammarError, GrammarMemory
from asyncllm.structured.json_schema import LLGUIDANCE_KEYWORDS, refuse_unenforced
from asyncllm.structured.merged_schemas import MAX_REMAINDERS, refuse_large_merges
from asyncllm.structured.references import refuse_infinite_references
from asyncllm.structured.spec import StructuredOutputs

CHARACTERS_PER_TRIED_STATE = 512
MAX_TRIED_STATES = 64
"""Maximum number of first states that are tried when a grammar is compiled. One more is tried for
each CHARACTERS_PER_TRIED_STATE characters of the grammar."""

MAX_ITEMS_PER_MASK = 16_000
"""Maximum number of Earley items that are made to compute one mask: about 6 ms."""

MAX_FUEL_PER_MASK = 30_000
"""Maximum lexer fuel (llguidance's unit of work) to compute one mask: about 2 ms."""

MAX_ITEMS_IN_ROW = 1000
"""Maximum number of the Earley parser's items (partly matched rules) after one token, 0.5 ms of
work, if the grammar is unambiguous. In JSON the brackets keep the number from growing with the
output."""

MAX_ITEMS_IN_AMBIGUOUS_ROW = 256
"""Maximum number of Earley items after one token, 0.3 ms of work, if the grammar may be ambiguous.
The time then grows with the cube of the output's length."""

MAX_STATES = 24_576
"""Maximum number of states of a grammar's automaton, which grows with its outputs. A string of
counted length needs a state for each character."""

COMPILE_FUEL = 100_000
"""Maximum lexer fuel to compile a grammar, and to follow its first forced text."""

BYTES_PER_GRAMMAR = 2**20
BYTES_PER_CHARACTER = 32
BYTES_PER_REMAINDER = 576
BYTES_PER_FORCED_CHARACTER = 480
BYTES_PER_STATE = 1024
BYTES_PER_TOKEN = 65_536
"""Upper bounds in bytes on the memory of a grammar, as measured. BYTES_PER_TOKEN is for expressions
that count after a choice, such as ``[a-z]*a[a-z]{200}``."""

MAX_FORCED_BYTES = 1024
MAX_FORCED_LITERAL_BYTES = 2**14
"""Maximum number of bytes that may be forced at once, if forced text is tokenised. llguidance
follows forced text to its end within one mask: for ``a{100000}`` it takes 0.1 s and 40 MB."""

_EXPRESSION_KEYWORDS = ('"pattern', '"regex"', '"grammar"')
_INLINE_SCHEMA = re.compile(r"%json[ \t\r\n]*+\{")
_REPETITION_COUNT = re.compile(r"\{\s*(\d+)")
_COUNTING_KEYWORDS = ('"minLength"', '"maxLength"', '"multipleOf"')


def may_force_text(spec: StructuredOutputs) -> bool:
    """Whether forced text is short enough for llguidance to follow it."""
    text, size = spec.text, len(spec.text)
    if spec.kind == "regex":
        counts = map(int, _REPETITION_COUNT.findall(text))
        return size * math.prod(max(1, count) for count in counts) <= MAX_FORCED_BYTES
    has_expression = spec.kind == "grammar" or any(name in text for name in _EXPRESSION_KEYWORDS)
    return not has_expression and size <= MAX_FORCED_LITERAL_BYTES


def estimate_memory(spec: StructuredOutputs) -> GrammarMemory:
    """Bound on a grammar's memory, by its length and accepted tokens."""
    text, forces_text = spec.text, may_force_text(spec)
    per_character = BYTES_PER_CHARACTER + BYTES_PER_FORCED_CHARACTER * forces_text
    size = BYTES_PER_GRAMMAR + len(text) * per_character
    if '"multipleOf"' in text:
        size += BYTES_PER_REMAINDER * MAX_REMAINDERS
    counts = any(name in text for name in _COUNTING_KEYWORDS)
    may_grow = spec.kind == "regex" or not forces_text or counts
    return GrammarMemory(size, BYTES_PER_TOKEN * may_grow, BYTES_PER_STATE * MAX_STATES)


def max_items_in_row(spec: StructuredOutputs) -> int:
    """Maximum number of Earley items after one token; more items make the next token slower."""
    # A structural tag can be ambiguous only if it has a repetition within a repetition.
    nested = spec.kind == "structural_tag" and spec.text.count('"tags_with_separator"') > 1
    is_ambiguous = nested or spec.kind == "grammar"
    return MAX_ITEMS_IN_AMBIGUOUS_ROW if is_ambiguous else MAX_ITEMS_IN_ROW


def refuse_unsupported_by_llguidance(*schemas: Any) -> None:
    """Raise GrammarError for a keyword that llguidance does not enforce, for a schema whose values
    never end, and for those whose parts llguidance could take hours to merge.

    Args:
        schemas: all schemas of one specification.
    """
    for schema in schemas:
        refuse_unenforced(schema, LLGUIDANCE_KEYWORDS)
        refuse_infinite_references(schema)
    refuse_large_merges(*schemas)


def refuse_unsupported_in_lark(grammar: str) -> None:
    """Raise GrammarError for the schemas of ``%json`` in a grammar whose values never end, or whose
    parts llguidance could take hours to merge.

    A text ``%json {`` counts in comments and strings too: JSON has to follow it everywhere.
    """
    if grammar.lstrip().startswith("{"):
        # llguidance's own JSON could hide ``%json`` behind an escape.
        raise GrammarError("begins with '{', expected a grammar in Lark or GBNF")
    schemas = []
    for start in (match.end() - 1 for match in _INLINE_SCHEMA.finditer(grammar)):
        try:
            schemas.append(json.JSONDecoder().raw_decode(grammar, start)[0])
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"no JSON behind %json at character {start} ({error})") from None
    for schema in schemas:
        refuse_infinite_references(schema)
    refuse_large_merges(*schemas)


def check_first_states(matcher: Any, mask_size: int, num_characters: int) -> None:
    """Raise GrammarError if the parser exceeds a limit in one of a grammar's first states.

    Args:
        matcher: llguidance's matcher in its initial state, which is not changed.
        mask_size: number of leading bytes of a mask that belong to the vocabulary.
        num_characters: length of the grammar; more states are tried for a longer one.
    """
    states = [matcher.deep_copy()]
    num_left = min(2 + num_characters // CHARACTERS_PER_TRIED_STATE, MAX_TRIED_STATES)
    while states and num_left:
        following = []
        for state in states[:num_left]:
            num_left -= 1
            mask = state.compute_bitmask()
            _check_limits(state)
            for token_id in _sample_allowed_tokens(mask[:mask_size]):
                next_state = state.deep_copy()
                next_state.consume_token(token_id)
                _check_limits(next_state)
                if not next_state.is_stopped():
                    following.append(next_state)
        states = following


def _check_limits(matcher: Any) -> None:
    if matcher.is_error() and matcher.stop_reason() != "NoExtensionBias":
        raise GrammarError(shorten_message(matcher.get_error()))


def _sample_allowed_tokens(mask: bytes) -> list[int]:
    """Up to four tokens that a mask allows, spread over the vocabulary."""
    token_ids = [8 * i + (byte & -byte).bit_length() - 1 for i, byte in enumerate(mask) if byte]
    return token_ids[:: max(1, len(token_ids) // 4)][:4]


def shorten_message(error: str) -> str:
    """Shorten an error message of llguidance to one line without the grammar."""
    if error.startswith("NoExtensionBias"):
        return "admits nothing"
    words = error.partition("\n1 | ")[0].replace("<non-verbose/>", "").split()
    return " ".join(words)[:500]
