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
    MAX_WHITESPACE,
    Grammar,
    GrammarError,
    GrammarMemory,
    Vocabulary,
)
from asyncllm.structured.json_schema import refuse_ignored_by_xgrammar, subschemas
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.structured.structural_tag import convert_to_format, schemas_in_tag

MAX_FREE_TEXT_SPANS = 4
"""Maximum number of ``any_text`` parts in a structural tag. With more, the tag may be ambiguous."""

MAX_WORK = 2000
"""Maximum work to compile a form, by ``estimate_work``. As much takes up to 2.5 s."""

_SMALL_VOCABULARY = 2000
_TOKENS_PER_UNIT = 40_000
"""Tokens of a vocabulary beyond _SMALL_VOCABULARY for which a unit of masks takes a millisecond."""

_CLOSED_TYPES = ("string", "object", "array", "boolean", "null")

_REPETITION = '"(?:tags_with_separator|optional|plus|star|repeat)"'

_NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class XGrammarBackend:
    """Grammar backend for schemas, choices and structural tags that llguidance cannot enforce.
    Schemas that xgrammar would partly ignore are refused before it compiles them, and so are rules
    that may be ambiguous: its parser has no limits, and one mask of 20 characters may take a
    minute."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = importlib.import_module("xgrammar")
        library, size = self._library, len(vocabulary.tokens)
        # xgrammar's vocabulary is the model's, and one more token, which ends a grammar.
        info = library.TokenizerInfo(
            [*vocabulary.tokens, b""],
            library.VocabType.RAW,
            vocab_size=size + 1,
            stop_token_ids=[size],
        )
        self._compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocabulary = vocabulary

    def compile(self, spec: StructuredOutputs) -> Grammar:
        refuse_ambiguous(spec)
        try:
            compiled = self._compile_spec(spec)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            # xgrammar's own errors are RuntimeErrors.
            raise GrammarError(_shorten_message(error)) from None

        def new_matcher() -> XGrammarMatcher:
            matcher = self._library.GrammarMatcher(compiled, terminate_without_stop_token=False)
            return XGrammarMatcher(matcher, self._vocabulary, memory)

        memory = GrammarMemory(compiled.memory_size_bytes)
        return Grammar(new_matcher, memory=memory)

    def _compile_spec(self, spec: StructuredOutputs) -> Any:
        compiler, text = self._compiler, spec.text
        match spec.kind:
            case "json" | "json_object":
                self._check(text, [json.loads(text)])
                return compiler.compile_json_schema(
                    text, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                )
            case "choice":
                self._check(text, [])
                choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
                return compiler.compile_grammar(f"root ::= {choices}")
            case "structural_tag":
                tag = json.loads(text)
                self._check(text, list(schemas_in_tag(tag)))
                return compiler.compile_structural_tag(convert_to_format(tag))

    def _check(self, text: str, schemas: list[Any]) -> None:
        """Raise GrammarError for a form of which xgrammar would partly ignore the schemas, or which
        takes too much work to compile."""
        for schema in schemas:
            refuse_ignored_by_xgrammar(schema)
        num_tokens = len(self._vocabulary.tokens)
        work = estimate_work(text, schemas, num_tokens)
        if work > MAX_WORK:
            raise GrammarError(
                f"takes a work of {work} to compile, expected at most {MAX_WORK} with a vocabulary "
                f"of {num_tokens} tokens: fewer subschemas, bounds of numbers, characters, or "
                "properties of one object, or no others beside them (additionalProperties: false)"
            )


class XGrammarMatcher:
    """State of one output in a grammar; see GrammarMatcher."""

    __slots__ = ("_mask", "_mask_words", "_matcher", "_memory", "_vocabulary")

    def __init__(self, matcher: Any, vocabulary: Vocabulary, memory: GrammarMemory) -> None:
        self._matcher: Any = matcher
        self._memory: GrammarMemory | None = memory
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
        # Only an empty mask shows that no token may follow. The mask is kept for the next step.
        if not self._matcher.is_completed():
            return False
        mask = self.bitmask()
        return mask == bytes(len(mask))

    def release(self) -> None:
        self._matcher = self._memory = None


def refuse_ambiguous(spec: StructuredOutputs) -> None:
    """Raise GrammarError for a specification whose grammar may be ambiguous."""
    if spec.kind == "structural_tag":
        num_rules = len(re.findall('"(?:regex|grammar)"', spec.text))
        num_repetitions = len(re.findall(_REPETITION, spec.text))
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


def estimate_work(text: str, schemas: Iterable[Any], num_tokens: int) -> int:
    """Work to compile a form, in milliseconds.

    The bounds of numbers become automata of their digits. The time for an object is quadratic in
    its properties, and longer if others may follow them. The masks that are made ahead take time
    in proportion to the vocabulary: most for the names and values of other properties, and for
    numbers behind which each of the object's properties may follow.

    Args:
        text: the form's JSON. Each character of a constant has a mask.
        schemas: the schemas in it.
        num_tokens: number of tokens of the vocabulary.
    """
    work, mask_units = 0, len(text) // 160
    for part in chain.from_iterable(map(subschemas, schemas)):
        properties = part.get("properties")
        values = list(properties.values()) if isinstance(properties, Mapping) else []
        num_properties = len(values)
        is_closed = part.get("additionalProperties") is False
        num_true = sum(value is True for value in values)  # These are no subschemas.
        work += 2 + 4 * num_true + 2 * sum(keyword in part for keyword in _NUMBER_BOUNDS)
        work += num_properties**2 // (160 if is_closed else 40)
        mask_units += 3 + 3 * num_true + num_properties * sum(map(_has_open_end, values)) // 5
        if part.get("type") == "object" and not is_closed:
            mask_units += 14 + 16 * num_properties
    return work + mask_units * max(0, num_tokens - _SMALL_VOCABULARY) // _TOKENS_PER_UNIT


def _has_open_end(schema: Any) -> bool:
    """Whether a token may end a value, because no quote or bracket does, and go on behind it."""
    if not isinstance(schema, Mapping):
        return True
    return schema.get("type") not in _CLOSED_TYPES and not schema.keys() & {"enum", "const"}


def _shorten_message(error: Exception) -> str:
    """Message of an xgrammar error, without the time and source line before it."""
    text = str(error).strip().partition("\n")[0]
    return text.rpartition(": ")[2][:500] if text.startswith("[") else text[:500]
