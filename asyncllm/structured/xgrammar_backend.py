"""XGrammarBackend: compiles grammars with xgrammar (pushdown automata over bytes)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from asyncllm.structured.grammar import (
    MAX_WHITESPACE_CHARACTERS,
    Grammar,
    GrammarError,
    GrammarMemoryBound,
    Vocabulary,
)
from asyncllm.structured.json_schema import (
    refuse_many_schemas,
    refuse_unsupported_by_xgrammar,
    subschemas,
)
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.structured.structural_tag import convert_to_format, schemas_in_tag

MAX_FREE_TEXT_SPANS = 4
"""Maximum number of ``any_text`` formats in a structural tag; more may make the tag ambiguous."""

MAX_COMPILE_MILLISECONDS = 2000
"""Maximum result of ``estimate_compile_milliseconds``. Measured compilations at the maximum took up
to 2.5 s."""

_SMALL_VOCABULARY_TOKENS = 2000
"""Vocabulary size at which the other constants of the time estimate were measured."""

_TOKENS_PER_MASK_MILLISECOND = 40_000
"""A unit of ``mask_units`` adds 1 ms per this many tokens beyond _SMALL_VOCABULARY_TOKENS."""

_SELF_DELIMITED_TYPES = ("string", "object", "array", "boolean", "null")

_REPETITION_KEYWORD_PATTERN = '"(?:tags_with_separator|optional|plus|star|repeat)"'

_NUMBER_BOUND_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class XGrammarBackend:
    """Grammar backend for schemas, choices and structural tags.

    It refuses schemas that xgrammar would partly ignore. It also refuses rules that may be
    ambiguous, because xgrammar's parser has no limits: computing one mask after 20 characters may
    take a minute.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = importlib.import_module("xgrammar")
        library, size = self._library, len(vocabulary.tokens)
        # xgrammar's vocabulary is the model's and one more token, which ends a grammar.
        info = library.TokenizerInfo(
            [*vocabulary.tokens, b""],
            library.VocabType.RAW,
            vocab_size=size + 1,
            stop_token_ids=[size],
        )
        self._compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocabulary = vocabulary

    def compile(self, spec: StructuredOutputs) -> Grammar:
        refuse_ambiguous_grammar(spec)
        try:
            compiled = self._compile_spec(spec)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            # xgrammar's own errors are RuntimeErrors.
            raise GrammarError(_shorten_message(error)) from None

        def new_matcher() -> XGrammarMatcher:
            matcher = self._library.GrammarMatcher(compiled, terminate_without_stop_token=False)
            return XGrammarMatcher(matcher, self._vocabulary, memory)

        memory = GrammarMemoryBound(compiled.memory_size_bytes)
        return Grammar(new_matcher, memory=memory)

    def _compile_spec(self, spec: StructuredOutputs) -> Any:
        compiler, text = self._compiler, spec.text
        match spec.kind:
            case "json" | "json_object":
                self._check_schemas(text, [json.loads(text)])
                return compiler.compile_json_schema(
                    text, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE_CHARACTERS
                )
            case "choice":
                self._check_schemas(text, [])
                choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
                return compiler.compile_grammar(f"root ::= {choices}")
            case "structural_tag":
                tag = json.loads(text)
                self._check_schemas(text, list(schemas_in_tag(tag)))
                return compiler.compile_structural_tag(convert_to_format(tag))

    def _check_schemas(self, text: str, schemas: list[Any]) -> None:
        """Raise GrammarError for schemas that xgrammar would partly ignore, or compile slowly."""
        refuse_many_schemas(*schemas)
        for schema in schemas:
            refuse_unsupported_by_xgrammar(schema)
        num_tokens = len(self._vocabulary.tokens)
        milliseconds = estimate_compile_milliseconds(text, schemas, num_tokens)
        if milliseconds > MAX_COMPILE_MILLISECONDS:
            raise GrammarError(
                f"takes a work of {milliseconds} to compile, expected at most "
                f"{MAX_COMPILE_MILLISECONDS} with a vocabulary of {num_tokens} tokens: fewer "
                "subschemas, bounds of numbers, characters, or properties of one object, or no "
                "others beside them (additionalProperties: false)"
            )


class XGrammarMatcher:
    """State of one output in a grammar; see GrammarMatcher."""

    __slots__ = ("_mask", "_mask_words", "_matcher", "_memory", "_vocabulary")

    def __init__(self, matcher: Any, vocabulary: Vocabulary, memory: GrammarMemoryBound) -> None:
        self._matcher: Any = matcher
        self._memory: GrammarMemoryBound | None = memory
        self._vocabulary = vocabulary
        # The mask has one more token than the vocabulary: the token that ends a grammar.
        num_words = len(vocabulary.tokens) // 32 + 1
        self._mask_words = np.zeros((1, num_words), dtype=np.int32)
        self._mask: bytearray | None = None

    def accept(self, token_id: int) -> bool:
        self._mask = None
        return self._matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._mask = None
        self._matcher.rollback(num_tokens)

    def bitmask(self) -> bytearray:
        if self._mask is None:
            self._matcher.fill_next_token_bitmask(self._mask_words, 0)
            self._mask = self._vocabulary.clear_padding(self._mask_words.tobytes())
        return self._mask.copy()

    def may_end(self) -> bool:
        return self._matcher.is_completed()

    def is_terminated(self) -> bool:
        # Only an empty mask shows that no token may follow. ``bitmask`` caches the mask.
        if not self._matcher.is_completed():
            return False
        mask = self.bitmask()
        return mask == bytes(len(mask))

    def release(self) -> None:
        self._matcher = self._memory = None


def refuse_ambiguous_grammar(spec: StructuredOutputs) -> None:
    """Raise GrammarError for a specification whose grammar may be ambiguous."""
    if spec.kind == "structural_tag":
        num_rules = len(re.findall('"(?:regex|grammar)"', spec.text))
        num_repetitions = len(re.findall(_REPETITION_KEYWORD_PATTERN, spec.text))
        num_free_texts = spec.text.count('"any_text"')
        is_refused = num_rules > 0 or num_repetitions > 1 or num_free_texts > MAX_FREE_TEXT_SPANS
        what = (
            f"a rule, two repetitions or {MAX_FREE_TEXT_SPANS + 1} free texts in a structural tag"
        )
    else:
        is_refused, what = spec.kind in ("regex", "grammar"), f"the kind {spec.kind!r}"
    if is_refused:
        raise GrammarError(
            f"xgrammar has no limit of work for {what}, expected the llguidance backend"
        )


def estimate_compile_milliseconds(text: str, schemas: Iterable[Any], num_tokens: int) -> int:
    """Estimate the milliseconds to compile a specification.

    - The bounds of numbers become automata of their digits.
    - The time for an object is quadratic in its properties, and longer with additional properties.
    - The compiler makes masks, whose time is proportional to the vocabulary. Additional properties
      need the most masks. Numbers in an object come next, as any property may follow a number.

    Args:
        text: JSON text of the specification. Each character of a constant needs a mask.
        schemas: the schemas in the specification.
        num_tokens: number of tokens of the vocabulary.
    """
    milliseconds, mask_units = 0, len(text) // 160
    for part in chain.from_iterable(map(subschemas, schemas)):
        properties = part.get("properties")
        values = list(properties.values()) if isinstance(properties, Mapping) else []
        num_properties = len(values)
        is_closed = part.get("additionalProperties") is False
        num_true = sum(value is True for value in values)  # ``subschemas`` omits the schema true.
        num_bounds = sum(keyword in part for keyword in _NUMBER_BOUND_KEYWORDS)
        milliseconds += 2 + 4 * num_true + 2 * num_bounds
        milliseconds += num_properties**2 // (160 if is_closed else 40)
        num_unclosed = sum(map(_values_lack_closing_delimiter, values))
        mask_units += 3 + 3 * num_true + num_properties * num_unclosed // 5
        if part.get("type") == "object" and not is_closed:
            mask_units += 14 + 16 * num_properties
    num_more_tokens = max(0, num_tokens - _SMALL_VOCABULARY_TOKENS)
    return milliseconds + mask_units * num_more_tokens // _TOKENS_PER_MASK_MILLISECOND


def _values_lack_closing_delimiter(schema: Any) -> bool:
    """Whether a value may end without a quote or bracket.

    One token may then hold the end of the value and the text after it.
    """
    if not isinstance(schema, Mapping):
        return True
    return schema.get("type") not in _SELF_DELIMITED_TYPES and not schema.keys() & {"enum", "const"}


def _shorten_message(error: Exception) -> str:
    """Message of an xgrammar error, without the time and source line before it."""
    text = str(error).strip().partition("\n")[0]
    return text.rpartition(": ")[2][:500] if text.startswith("[") else text[:500]
