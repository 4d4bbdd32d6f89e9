"""LLGuidanceBackend: compiles grammars with llguidance (an Earley parser)."""

from __future__ import annotations

import importlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.structured.grammar import (
    WHITESPACE_PATTERN,
    Grammar,
    GrammarError,
    GrammarMemoryBound,
    MaskSpeed,
    Vocabulary,
    is_gbnf,
)
from asyncllm.structured.lark_rules import MAX_ALTERNATIVES, LarkRules, UnreadableGrammarError
from asyncllm.structured.parser_limits import (
    MAX_COMPILE_LEXER_FUEL,
    MAX_EARLEY_ITEMS_PER_MASK,
    MAX_LEXER_FUEL_PER_MASK,
    MAX_LEXER_STATES,
    can_follow_forced_text,
    check_first_states,
    estimate_memory,
    max_earley_items_in_row,
    max_right_recursive_bytes,
    refuse_unsupported_by_llguidance,
    refuse_unsupported_in_lark,
    shorten_message,
)
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.structured.structural_tag import to_lark

_JSON_OPTIONS = {
    "whitespace_pattern": WHITESPACE_PATTERN,
    "lenient": False,
    "coerce_one_of": False,
    # Allow \u escapes of any character, as JSON and xgrammar do.
    "json_allow_general_unicode_escapes": True,
}

_LARK_KINDS = ("grammar", "structural_tag")
"""Kinds of specifications that are converted to a Lark grammar."""

_NO_FORCING_LARK_STATEMENT = '%llguidance {"no_forcing": true}'
"""Lark statement that keeps llguidance from computing the text that a grammar forces."""

_MAX_TOKEN_BYTES = 32
"""Maximum size in bytes of a token that llguidance's greedy tokeniser considers."""

_MAX_PREFIX_DEPTH = 40
"""Maximum depth to which common prefixes of choices are factored out into groups. llguidance's
regular expressions may have 250 nested groups."""

_REGEX_ESCAPES = tuple(chr(i) if chr(i).isalnum() else f"\\x{{{i:x}}}" for i in range(128))
"""Regular expressions that match one ASCII character each, by code point."""

_MAX_FORCED_BYTES = 64
"""Maximum number of bytes of a forced text to tokenise. llguidance uses only the first token, and
tokenises again for each mask."""


MAX_GBNF_WORK = 2**23
"""Maximum number of rules of a GBNF grammar times its characters. The conversion, in Python, may
read all rules again for each rule. The maximum takes up to 1 s."""

COMMENTS_PER_RULE = 16
"""Number of GBNF comments that count as a rule. The conversion copies all comments for each."""


class LLGuidanceBackend:
    """Default grammar backend; it refuses JSON Schema keywords that llguidance does not enforce."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = importlib.import_module("llguidance")
        self._vocabulary = vocabulary
        wrapper = self._library.TokenizerWrapper(_TokenizerAdapter(vocabulary))
        # llguidance's vocabulary is the model's and one more token, which ends a grammar.
        self._tokenizer = self._library.LLTokenizer(wrapper)

    def compile(self, spec: StructuredOutputs) -> Grammar:
        limits = self._library.LLParserLimits(
            max_items_in_row=max_earley_items_in_row(spec),
            step_max_items=MAX_EARLEY_ITEMS_PER_MASK,
            initial_lexer_fuel=MAX_COMPILE_LEXER_FUEL,
            step_lexer_fuel=MAX_LEXER_FUEL_PER_MASK,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )
        grammar = self._make_grammar(spec)
        max_bytes = self._check_rules(grammar) if spec.kind in _LARK_KINDS else None
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(shorten_message(matcher.get_error()))
        check_first_states(matcher, self._vocabulary.mask_size, len(spec.text))
        memory, vocabulary = estimate_memory(spec), self._vocabulary
        return Grammar(
            lambda: LLGuidanceMatcher(matcher.deep_copy(), vocabulary, spec, memory, max_bytes),
            vocabulary.special_tokens,
            memory,
            mask_speed=MaskSpeed(may_jump=max_bytes is not None),
        )

    def _check_rules(self, lark: str) -> int | None:
        """Refuse rules whose rows are not bounded; see ``max_right_recursive_bytes``."""
        try:
            return max_right_recursive_bytes(LarkRules(lark))
        except UnreadableGrammarError as error:
            if lark.count("|") <= MAX_ALTERNATIVES:
                message = self._library.LLMatcher.validate_grammar(lark, self._tokenizer)
                error = GrammarError(shorten_message(message)) if message else error
            raise error from None

    def _make_grammar(self, spec: StructuredOutputs) -> str:
        grammar = self._convert_to_grammar(spec)
        if can_follow_forced_text(spec):
            return grammar
        if spec.kind not in _LARK_KINDS:
            (part,) = json.loads(grammar)["grammars"]
            grammar = part["lark_grammar"] or f"start: %json {json.dumps(part['json_schema'])}"
        return f"{grammar}\n{_NO_FORCING_LARK_STATEMENT}"  # The last %llguidance statement applies.

    def _convert_to_grammar(self, spec: StructuredOutputs) -> str:
        library, text = self._library.LLMatcher, spec.text
        try:
            match spec.kind:
                case "json" | "json_object":
                    refuse_unsupported_by_llguidance(json.loads(text))
                    return library.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
                case "regex":
                    return library.grammar_from_regex(_strip_anchors(text))
                case "choice":
                    return library.grammar_from_regex(_choices_regex(sorted(json.loads(text))))
                case "structural_tag":
                    special_tokens = (
                        self._vocabulary.special_tokens if spec.param == "tools" else {}
                    )
                    return to_lark(json.loads(text), special_tokens)
                case "grammar":
                    lark = _grammar_to_lark(text)
                    refuse_unsupported_in_lark(lark)
                    return lark
        except ValueError as error:
            raise GrammarError(str(error)) from None


@dataclass(slots=True, eq=False)
class LLGuidanceMatcher:
    """State of one output in a grammar; see GrammarMatcher."""

    _matcher: Any
    _vocabulary: Vocabulary
    _spec: StructuredOutputs
    _memory: GrammarMemoryBound
    _max_bytes: int | None = None
    _token_sizes: list[int] = field(default_factory=list)
    _num_bytes: int = 0

    def accept(self, token_id: int) -> bool:
        self._memory.num_accepted_tokens += 1
        if self._max_bytes is not None:
            self._token_sizes.append(len(self._vocabulary.tokens[token_id]))
            self._num_bytes += self._token_sizes[-1]
            if self._num_bytes > self._max_bytes:
                raise self._make_limit_error(
                    f"more than {self._max_bytes} bytes under rules that end with themselves, make "
                    "the grammar left-recursive"
                )
        if self._matcher.consume_token(token_id):
            return True
        error = self._matcher.get_error()
        if "satisfy the grammar" in error:
            return False
        raise self._make_limit_error(error)

    def rollback(self, num_tokens: int) -> None:
        for size in [self._token_sizes.pop() for _ in self._token_sizes[-num_tokens:]]:
            self._num_bytes -= size
        if not self._matcher.rollback(num_tokens):
            raise self._make_limit_error(self._matcher.get_error())

    def bitmask(self) -> bytearray:
        mask = self._matcher.compute_bitmask()
        if not self._matcher.is_error():
            return self._vocabulary.clear_padding(mask)
        if self._matcher.stop_reason() == "NoExtensionBias":
            # No token can follow, so the mask is empty.
            return bytearray(self._vocabulary.mask_size)
        raise self._make_limit_error(self._matcher.get_error())

    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def is_terminated(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def release(self) -> None:
        self._matcher = None
        # Drop the grammar's memory bound; GrammarCompiler does not count the new one.
        self._memory = GrammarMemoryBound()

    def _make_limit_error(self, message: str) -> Exception:
        """Make the error for an output whose next token exceeds the limits of the parser."""
        # The grammar's matchers share the lexer and therefore its errors.
        self._memory.is_exhausted |= "lexer error" in message
        reason, param = shorten_message(message), self._spec.param
        what = f"{param}.{self._spec.kind}" if param == "structured_outputs" else param
        return InvalidRequestError(
            f"{what}: too complex for the next token, expected fewer alternatives at a time: "
            f"{reason}",
            param=param,
        )


class _TokenizerAdapter:
    """Adapter of a Vocabulary to llguidance's interface, with one more token, the end token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special_tokens = vocabulary.special_tokens
        size = len(vocabulary.tokens)
        named = {i: name.encode() for i, name in special_tokens.items() if i < size}
        self.tokens = [named.get(i, data) for i, data in enumerate(vocabulary.tokens)]
        self.tokens.append(b"<|end of grammar|>")
        self.special_token_ids = [*named, size]
        self.eos_token_id = size
        self.bos_token_id = None
        self._encode = vocabulary.encode
        self._token_bytes = vocabulary.tokens
        self._id_by_bytes = {data: i for i, data in enumerate(vocabulary.tokens) if data}
        self._max_token_bytes = min(max(map(len, self._id_by_bytes), default=0), _MAX_TOKEN_BYTES)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenise a text that a grammar forces.

        If only one text can follow, llguidance allows only the first token of this tokenisation.
        """
        data = (text.encode() if isinstance(text, str) else text)[:_MAX_FORCED_BYTES]
        with suppress(Exception):
            token_ids = self._encode(data.decode())
            if b"".join(self._token_bytes[i] for i in token_ids) == data:
                return token_ids
        # The tokenizer cannot encode the text exactly: the text ends within a character, the text
        # spells a special token, or the tokenizer puts a space before every text.
        return self._tokenise_longest_first(data)

    def _tokenise_longest_first(self, data: bytes) -> list[int]:
        token_ids, start = [], 0
        while start < len(data):
            for end in range(min(start + self._max_token_bytes, len(data)), start, -1):
                token_id = self._id_by_bytes.get(data[start:end])
                if token_id is not None:
                    token_ids.append(token_id)
                    break
            else:
                break  # No token of the vocabulary begins the rest of the text.
            start = end
        return token_ids


def _grammar_to_lark(text: str) -> str:
    if not is_gbnf(text):
        return text
    work = (text.count("::=") + text.count("#") // COMMENTS_PER_RULE) * len(text)
    if work > MAX_GBNF_WORK:
        raise GrammarError(
            f"GBNF takes a work of {work} to convert (its rules times its characters), expected at "
            f"most {MAX_GBNF_WORK}: fewer rules or comments"
        )
    convert = importlib.import_module("llguidance.gbnf_to_lark").gbnf_to_lark
    try:
        return convert(text)
    except Exception as error:
        raise GrammarError(f"the GBNF cannot be read: {str(error)[:500]}") from None


def _strip_anchors(regex: str) -> str:
    """Remove the anchors around an expression: llguidance always matches the whole output."""
    if regex.startswith("^"):
        regex = regex[1:]
    if regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\"))) % 2:
        regex = regex[:-1]
    return regex


def _choices_regex(choices: list[str], depth: int = 0) -> str:
    """Regular expression that matches exactly the sorted ``choices``.

    Common prefixes are factored out, because the lexer follows each alternative separately.
    """
    parts, first = [], 0
    for end in range(1, len(choices) + 1):
        if end < len(choices) and choices[end][:1] == choices[first][:1]:
            continue
        group = choices[first:end]
        pairs = enumerate(zip(group[0], group[-1], strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), len(group[0]))
        head, tails = _escape_regex(group[0][:shared]), [choice[shared:] for choice in group]
        if len(group) > 1 and depth < _MAX_PREFIX_DEPTH and shared:
            parts.append(f"{head}({_choices_regex(tails, depth + 1)})")
        else:
            parts += [head + _escape_regex(tail) for tail in tails]
        first = end
    return "|".join(parts)


def _escape_regex(text: str) -> str:
    """Regular expression that matches exactly ``text``."""
    return text.translate(_REGEX_ESCAPES)
