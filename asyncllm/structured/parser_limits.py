"""Limits of llguidance's parser, and a check of a grammar's first states against the limits.

The parser applies the limits at each token of an output. A grammar that exceeds a limit in one of
its first states is refused when it is compiled. If a later state exceeds a limit, the request ends.

The limits count work, not time, so that a request's result does not depend on the load. The limits
are below llguidance's defaults, and above the needs of practical schemas. They are needed because a
step of the Earley parser takes time quadratic in its items, and the items of an ambiguous grammar
grow with each token.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

from asyncllm.structured.grammar import GrammarError, GrammarMemoryBound
from asyncllm.structured.json_schema import (
    LLGUIDANCE_KEYWORDS,
    refuse_many_schemas,
    refuse_unenforced_keywords,
)
from asyncllm.structured.lark_rules import MAX_COMPLETIONS, LarkRules
from asyncllm.structured.merged_schemas import (
    MAX_MULTIPLEOF_REMAINDERS,
    refuse_large_merges,
    refuse_many_alternatives,
)
from asyncllm.structured.references import refuse_infinite_references
from asyncllm.structured.spec import StructuredOutputs

GRAMMAR_CHARACTERS_PER_CHECKED_STATE = 512
"""After compilation, one parser state is checked per this many characters of the grammar."""

MAX_CHECKED_PARSER_STATES = 64
"""Maximum number of parser states whose masks are computed and checked after compilation, beginning
with the initial state."""

MAX_EARLEY_ITEMS_PER_MASK = 16_000
"""Maximum number of Earley items (partly matched rules) made to compute one mask: about 6 ms."""

MAX_LEXER_FUEL_PER_MASK = 30_000
"""Maximum lexer fuel (llguidance's unit of work) to compute one mask: about 2 ms."""

MAX_EARLEY_ITEMS_IN_ROW = 1000
"""Maximum number of Earley items after one token, for an unambiguous grammar: about 0.5 ms. A JSON
output's items do not grow in number with its length, because a closing bracket ends items."""

MAX_EARLEY_ITEMS_IF_AMBIGUOUS = 256
"""Maximum number of Earley items after one token, for a grammar that may be ambiguous: about
0.3 ms. The time for an ambiguous grammar grows with the cube of the output's length."""

MAX_RIGHT_RECURSIVE_PARTS = 16
"""Maximum number of right-recursive symbols that one row of the Earley parser may wait for, such as
the ``x`` in both alternatives of ``x: "a" x "b"? | "a" x | "c"``."""

MAX_RIGHT_RECURSION_WORK = 5 * 10**8
"""Maximum work of one token that completes items of all rows, as right recursion allows.
llguidance checks its limits only then. The maximum takes some 0.4 s on the thread that makes masks,
without the GIL."""

MAX_LEXER_STATES = 24_576
"""Maximum number of states of a grammar's lexer, which adds states while it reads outputs. An
expression such as ``a{1000}`` needs a state for each character."""

MAX_COMPILE_LEXER_FUEL = 100_000
"""Maximum lexer fuel to compile a grammar and compute the text that it forces at its beginning."""

# Measured upper bounds on a grammar's memory.
BASE_BYTES_PER_GRAMMAR = 2**20
BYTES_PER_GRAMMAR_BYTE = 32
BYTES_PER_MULTIPLEOF_REMAINDER = 576
BYTES_PER_FORCED_BYTE = 480
BYTES_PER_LEXER_STATE = 1024
BYTES_PER_ACCEPTED_TOKEN = 65_536
"""Measured upper bound on the memory that a grammar gains per accepted token. Worst are expressions
with a counted repetition that may begin anywhere, such as ``[a-z]*a[a-z]{200}``."""

MAX_FORCED_REGEX_BYTES = 1024
MAX_FORCED_LITERAL_BYTES = 2**14
"""Maximum number of bytes of forced text for llguidance to tokenise it. To compute one mask,
llguidance follows such a text to its end: ``a{100000}`` takes 0.1 s and 40 MB."""

_EXPRESSION_KEYWORDS = ('"pattern', '"regex"', '"grammar"')
_INLINE_SCHEMA_PATTERN = re.compile(r"%json[ \t\r\n]*+\{")
_REPETITION_COUNT_PATTERN = re.compile(r"\{\s*(\d+)")
_COSTLY_NUMBER_KEYWORDS = ('"minLength"', '"maxLength"', '"multipleOf"')


def can_follow_forced_text(spec: StructuredOutputs) -> bool:
    """Whether the text that a grammar forces is short enough for llguidance to follow."""
    text, size = spec.text, _num_utf8_bytes(spec.text)
    if spec.kind == "regex":
        counts = map(int, _REPETITION_COUNT_PATTERN.findall(text))
        return size * math.prod(max(1, count) for count in counts) <= MAX_FORCED_REGEX_BYTES
    has_expression = spec.kind == "grammar" or any(name in text for name in _EXPRESSION_KEYWORDS)
    return not has_expression and size <= MAX_FORCED_LITERAL_BYTES


def _num_utf8_bytes(text: str) -> int:
    """Length of a text for llguidance, whose automata are over bytes."""
    return len(text.encode("utf-8", "surrogatepass"))


def estimate_memory(spec: StructuredOutputs) -> GrammarMemoryBound:
    """Estimate an upper bound on a grammar's memory from its length and its accepted tokens."""
    text, forces_text = spec.text, can_follow_forced_text(spec)
    per_byte = BYTES_PER_GRAMMAR_BYTE + BYTES_PER_FORCED_BYTE * forces_text
    size = BASE_BYTES_PER_GRAMMAR + _num_utf8_bytes(text) * per_byte
    if '"multipleOf"' in text:
        size += BYTES_PER_MULTIPLEOF_REMAINDER * MAX_MULTIPLEOF_REMAINDERS
    counts = any(name in text for name in _COSTLY_NUMBER_KEYWORDS)
    may_grow = spec.kind == "regex" or not forces_text or counts
    return GrammarMemoryBound(
        size, BYTES_PER_ACCEPTED_TOKEN * may_grow, BYTES_PER_LEXER_STATE * MAX_LEXER_STATES
    )


def max_earley_items_in_row(spec: StructuredOutputs) -> int:
    """Maximum number of Earley items after one token; more items make the next token slower."""
    # A structural tag can be ambiguous only if it has a repetition within a repetition.
    nested = spec.kind == "structural_tag" and spec.text.count('"tags_with_separator"') > 1
    is_ambiguous = nested or spec.kind == "grammar"
    return MAX_EARLEY_ITEMS_IF_AMBIGUOUS if is_ambiguous else MAX_EARLEY_ITEMS_IN_ROW


def refuse_unsupported_by_llguidance(*schemas: Any) -> None:
    """Raise GrammarError for schemas that llguidance cannot enforce in bounded time.

    Such a schema has a keyword that llguidance does not enforce, or no finite value satisfies it,
    or llguidance could take hours to merge its parts.

    Args:
        schemas: all schemas of one specification.
    """
    refuse_many_schemas(*schemas)
    for schema in schemas:
        refuse_unenforced_keywords(schema, LLGUIDANCE_KEYWORDS)
        refuse_infinite_references(schema)
    refuse_large_merges(*schemas)


def max_right_recursive_bytes(rules: LarkRules) -> int | None:
    """Maximum number of bytes of an output, where one token may complete all rows of the parser;
    None if no token may.

    A row may have n parts to complete, once for each of the n before it, among the items of all
    rows; the measured time is that of ``n**3 + 2`` items for each two rows.

    Raises:
        GrammarError: if there are too many such parts, or MAX_COMPLETIONS is exceeded.
    """
    num_completions = rules.count_completions()
    if num_completions > MAX_COMPLETIONS:
        raise GrammarError(
            f"rules take {num_completions} completions (alternatives that may end at one place, "
            f"times parts that may wait for them), expected at most {MAX_COMPLETIONS}"
        )
    count = rules.count_right_recursive_parts()
    if count > MAX_RIGHT_RECURSIVE_PARTS:
        raise GrammarError(
            f"{count} alternatives may end with their own rule at the same place, expected at most "
            f"{MAX_RIGHT_RECURSIVE_PARTS}: make the grammar left-recursive"
        )
    return math.isqrt(MAX_RIGHT_RECURSION_WORK // (count**3 + 2)) if count else None


def refuse_unsupported_in_lark(grammar: str) -> None:
    """Raise GrammarError for ``%json`` schemas that llguidance cannot enforce in bounded time.

    No finite value satisfies such a schema, or llguidance could take hours to merge its parts.
    ``%json`` and a brace begin a schema even in comments and strings.
    """
    if grammar.lstrip().startswith("{"):
        # Escapes in llguidance's JSON format could hide ``%json`` from the search below.
        raise GrammarError("begins with '{', expected a grammar in Lark or GBNF")
    schemas = []
    for start in (match.end() - 1 for match in _INLINE_SCHEMA_PATTERN.finditer(grammar)):
        try:
            schemas.append(json.JSONDecoder().raw_decode(grammar, start)[0])
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"no JSON behind %json at character {start} ({error})") from None
    refuse_many_schemas(*schemas)
    for schema in schemas:
        refuse_infinite_references(schema)
    refuse_large_merges(*schemas)
    refuse_many_alternatives(schemas)


def check_first_states(matcher: Any, mask_size: int, num_characters: int) -> None:
    """Raise GrammarError if the parser exceeds a limit in one of a grammar's first states.

    Args:
        matcher: llguidance's matcher in its initial state, which is not changed.
        mask_size: number of leading bytes of a mask that belong to the vocabulary.
        num_characters: length of the grammar; a longer grammar has more states checked.
    """
    states = [matcher.deep_copy()]
    num_left = min(
        2 + num_characters // GRAMMAR_CHARACTERS_PER_CHECKED_STATE, MAX_CHECKED_PARSER_STATES
    )
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
    byte_indices = np.flatnonzero(np.frombuffer(mask, np.uint8))
    sampled = byte_indices[:: max(1, len(byte_indices) // 4)][:4].tolist()
    return [8 * i + (mask[i] & -mask[i]).bit_length() - 1 for i in sampled]


def shorten_message(error: str) -> str:
    """Shorten an error message of llguidance to one line without the grammar."""
    if error.startswith("NoExtensionBias"):
        return "admits nothing"
    words = error.partition("\n1 | ")[0].replace("<non-verbose/>", "").split()
    return " ".join(words)[:500]
