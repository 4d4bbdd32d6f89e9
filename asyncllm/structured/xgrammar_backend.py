"""XGrammarBackend: xgrammar's grammars (pushdown automata over bytes)."""

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
    refuse_work,
)
from asyncllm.structured.json_schema import refuse_ignored_by_xgrammar
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.structured.structural_tag import schemas_in_tag, with_format

MAX_WORK = 2**16
"""Most work of an output under a caller's own rules: their characters times the square of the
output's bytes. The parser counts nothing and has no limits; the costs of ambiguous rules grow with
the cube of the output, to half a second here."""

MAX_TEXTS = 4
"""Most parts of free text in a structural tag that do not count as rules."""


class XGrammarBackend:
    """Second backend. Schemas that it would partly ignore are refused before."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = importlib.import_module("xgrammar")
        library, size = self._library, len(vocabulary.tokens)
        # One more token, after the model's, ends a grammar.
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
            compiled = self._compile(spec)
        except (
            AttributeError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:  # xgrammar's own errors are RuntimeErrors
            raise GrammarError(_short(error)) from None
        most = most_bytes(spec)

        def new_matcher() -> XGrammarMatcher:
            matcher = self._library.GrammarMatcher(compiled, terminate_without_stop_token=False)
            return XGrammarMatcher(matcher, self._vocabulary, spec, most)

        return Grammar(new_matcher)

    def _compile(self, spec: StructuredOutputs) -> Any:
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
                tag = with_format(json.loads(text))
                for schema in schemas_in_tag(tag):
                    refuse_ignored_by_xgrammar(schema)
                return compiler.compile_structural_tag(tag)
            case "grammar":
                if is_gbnf(text):
                    return compiler.compile_grammar(text)
                return compiler.compile_lark(text)


class XGrammarMatcher:
    """State of one output in a grammar; see GrammarMatcher."""

    __slots__ = ("_left", "_mask", "_matcher", "_most", "_spec", "_vocabulary", "_words")

    def __init__(
        self, matcher: Any, vocabulary: Vocabulary, spec: StructuredOutputs, most: float
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._spec = spec
        self._most = self._left = most
        num_words = len(vocabulary.tokens) // 32 + 1  # with the token that ends a grammar
        self._words = np.zeros((1, num_words), dtype=np.int32)
        self._mask: bytearray | None = None

    def accept(self, token_id: int) -> bool:
        self._mask = None
        self._left -= len(self._vocabulary.tokens[token_id])
        if self._left < 0:
            raise refuse_work(
                self._spec,
                f"xgrammar takes at most {self._most} bytes under rules of "
                f"{len(self._spec.text)} characters; expected fewer of one, or llguidance",
            )
        return self._matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._mask = None
        self._matcher.rollback(num_tokens)

    def bitmask(self) -> bytearray:
        if self._mask is None:
            self._matcher.fill_next_token_bitmask(self._words, 0)
            self._mask = self._vocabulary.cut(self._words.tobytes())
        return self._mask.copy()

    def may_end(self) -> bool:
        return self._matcher.is_completed()

    def is_terminated(self) -> bool:
        # Only the mask tells whether anything may follow; the next step needs it anyway.
        if not self._matcher.is_completed():
            return False
        mask = self.bitmask()
        return mask == bytes(len(mask))


def most_bytes(spec: StructuredOutputs) -> float:
    """Most bytes of an output. Those of schemas and choices, whose brackets leave nothing
    ambiguous, have no such bound."""
    own_rules = spec.kind in ("regex", "grammar")
    if spec.kind == "structural_tag":
        rules = len(re.findall('"(?:regex|grammar)"', spec.text))
        repeated = len(re.findall('"(?:tags_with_separator|optional|plus|star|repeat)"', spec.text))
        texts = spec.text.count('"any_text"')
        own_rules = rules > 0 or repeated > 1 or texts > MAX_TEXTS
    return math.isqrt(MAX_WORK // len(spec.text)) if own_rules else math.inf


def _short(error: Exception) -> str:
    """Message of an error, without the time and source line that xgrammar puts before it."""
    text = str(error).strip().partition("\n")[0]
    return text.rpartition(": ")[2][:500] if text.startswith("[") else text[:500]
