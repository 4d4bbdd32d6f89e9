"""XGrammarBackend: compiles grammars with xgrammar (pushdown automata over bytes)."""

from __future__ import annotations

import importlib
import json
import math
import re
from typing import Any

import numpy as np

from asyncllm.structured.grammar import (
    MAX_WHITESPACE,
    Grammar,
    GrammarError,
    Vocabulary,
    is_gbnf,
    too_complex_error,
)
from asyncllm.structured.json_schema import refuse_ignored_by_xgrammar
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.structured.structural_tag import convert_to_format, schemas_in_tag

MAX_WORK = 2**16
"""Maximum work for an output under a caller's own rules: the characters of the rules times the
square of the output's bytes. xgrammar's parser has no limits of its own. With ambiguous rules, its
time grows with the cube of the output's length; at this limit it is half a second."""

MAX_FREE_TEXT_SPANS = 4
"""Maximum number of ``any_text`` parts in a structural tag without a limit of work. With more, the
tag may be ambiguous, and MAX_WORK applies to it."""


class XGrammarBackend:
    """Grammar backend for grammars that llguidance cannot enforce. Schemas that xgrammar would
    partly ignore are refused before it compiles them."""

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
        try:
            compiled = self._compile_spec(spec)
        except (
            AttributeError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:  # xgrammar's own errors are RuntimeErrors.
            raise GrammarError(_shorten_message(error)) from None
        max_bytes = max_output_bytes(spec)

        def new_matcher() -> XGrammarMatcher:
            matcher = self._library.GrammarMatcher(compiled, terminate_without_stop_token=False)
            return XGrammarMatcher(matcher, self._vocabulary, spec, max_bytes)

        return Grammar(new_matcher)

    def _compile_spec(self, spec: StructuredOutputs) -> Any:
        compiler, text = self._compiler, spec.text
        match spec.kind:
            case "json" | "json_object":
                refuse_ignored_by_xgrammar(json.loads(text))
                return compiler.compile_json_schema(
                    text, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                )
            case "regex":
                return compiler.compile_regex(text)
            case "choice":
                choices = " | ".join(json.dumps(one) for one in json.loads(text))
                return compiler.compile_grammar(f"root ::= {choices}")
            case "structural_tag":
                tag = convert_to_format(json.loads(text))
                for schema in schemas_in_tag(tag):
                    refuse_ignored_by_xgrammar(schema)
                return compiler.compile_structural_tag(tag)
            case "grammar":
                if is_gbnf(text):
                    return compiler.compile_grammar(text)
                return compiler.compile_lark(text)


class XGrammarMatcher:
    """State of one output in a grammar; see GrammarMatcher."""

    __slots__ = (
        "_bytes_left",
        "_mask",
        "_mask_words",
        "_matcher",
        "_max_output_bytes",
        "_spec",
        "_vocabulary",
    )

    def __init__(
        self, matcher: Any, vocabulary: Vocabulary, spec: StructuredOutputs, max_bytes: float
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._spec = spec
        self._max_output_bytes = self._bytes_left = max_bytes
        # One token more than the vocabulary's: it ends a grammar.
        num_words = len(vocabulary.tokens) // 32 + 1
        self._mask_words = np.zeros((1, num_words), dtype=np.int32)
        self._mask: bytearray | None = None

    def accept(self, token_id: int) -> bool:
        self._mask = None
        self._bytes_left -= len(self._vocabulary.tokens[token_id])
        if self._bytes_left < 0:
            raise too_complex_error(
                self._spec,
                f"xgrammar takes at most {self._max_output_bytes} bytes under rules of "
                f"{len(self._spec.text)} characters; expected fewer of one, or llguidance",
            )
        return self._matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._mask = None
        self._matcher.rollback(num_tokens)

    def bitmask(self) -> bytearray:
        if self._mask is None:
            self._matcher.fill_next_token_bitmask(self._mask_words, 0)
            self._mask = self._vocabulary.cut(self._mask_words.tobytes())
        return self._mask.copy()

    def may_end(self) -> bool:
        return self._matcher.is_completed()

    def is_terminated(self) -> bool:
        # Only an empty mask shows that no token may follow. The mask is kept for the next step.
        if not self._matcher.is_completed():
            return False
        mask = self.bitmask()
        return mask == bytes(len(mask))


def max_output_bytes(spec: StructuredOutputs) -> float:
    """Maximum size in bytes of an output under a specification.

    It is infinite for schemas and choices, because their rules are not ambiguous.
    """
    own_rules = spec.kind in ("regex", "grammar")
    if spec.kind == "structural_tag":
        rules = len(re.findall('"(?:regex|grammar)"', spec.text))
        repeated = len(re.findall('"(?:tags_with_separator|optional|plus|star|repeat)"', spec.text))
        texts = spec.text.count('"any_text"')
        own_rules = rules > 0 or repeated > 1 or texts > MAX_FREE_TEXT_SPANS
    return math.isqrt(MAX_WORK // len(spec.text)) if own_rules else math.inf


def _shorten_message(error: Exception) -> str:
    """Message of an xgrammar error, without the time and source line before it."""
    text = str(error).strip().partition("\n")[0]
    return text.rpartition(": ")[2][:500] if text.startswith("[") else text[:500]
