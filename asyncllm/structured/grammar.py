"""Grammar: the protocols of compiled grammars and backends, and the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from asyncllm.structured.spec import StructuredOutputs

MIN_QUICK_MASKS = 256
"""Number of quick masks in a row after which a grammar is known to be quick. A slow mask then
delays a step at most once per this many tokens."""


AUTOMATON_BYTES_PER_SECOND = 128 * 2**20
"""Estimated bytes that a lexer automaton gains per CPU second of slow masks. 14 expressions made
to grow gained 55 MiB on average, and two of them 250 MiB."""

FREE_MASK_SECONDS_PER_TOKEN = 40e-9
"""CPU seconds per token of the vocabulary up to which a mask counts as adding no state to the
lexer's automaton."""


def automaton_bytes(slow_mask_seconds: float) -> int:
    """Estimate the bytes that an automaton has gained from its CPU seconds of slow masks."""
    return int(slow_mask_seconds * AUTOMATON_BYTES_PER_SECOND)


class GrammarError(Exception):
    """Error for a grammar that a backend cannot compile.

    The message says whether the grammar is malformed, has a feature that the backend does not
    enforce, or exceeds the backend's limits.
    """


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF rather than Lark.

    In GBNF a line begins with a rule's name and ``::=``. Lark may contain ``::=`` elsewhere, in a
    string or comment. Lark's ``start:`` is not looked for, because it may also be written
    ``?start:`` or ``start[…]:``.
    """
    return re.search(r"(?m)^[^\S\n]*+[\w-]++\s*+::=", text) is not None


class GrammarMatcher(Protocol):
    """State of one output in a compiled grammar; used by one thread at a time.

    It gets tokens of text, and only those special tokens that the grammar names.
    ``RequestGrammar`` handles EOS and stop tokens. If a method raises, only the output's request
    ends.
    """

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False if the grammar does not allow it here."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        ...

    def bitmask(self) -> bytearray:
        """Compute the mask of the tokens that may come next, in the layout of ``GrammarMask``. The
        caller may change it. No bit beyond the vocabulary is set."""
        ...

    def may_end(self) -> bool:
        """Whether the output so far is complete."""
        ...

    def is_terminated(self) -> bool:
        """Whether the output so far is complete, and no token may follow."""
        ...

    def release(self) -> None:
        """Free the parser's state and this matcher's reference to the grammar's memory, even if an
        application still refers to the matcher. No other method may be called afterwards.
        Idempotent; any thread may call it."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class GrammarMemoryBound:
    """Upper bound on the memory that a compiled grammar shares with its matchers.

    The grammar and each matcher refer to this object while they use the memory, so the object lives
    as long as the memory.

    Attributes:
        compiled_bytes: bytes right after the compilation, before any token.
        bytes_per_token: bytes that each accepted token may add to the shared automaton.
        max_added_bytes: maximum number of bytes that all tokens may add.
        num_accepted_tokens: number of accepted tokens, of all outputs.
        slow_mask_seconds: CPU seconds of all outputs' masks, less FREE_MASK_SECONDS_PER_TOKEN for
            each mask and token of the vocabulary.
        on_growth: called when ``automaton_bytes`` reaches another MiB, on the thread that makes the
            mask.
        is_exhausted: whether the shared automaton is at its limit, so that no output can begin.
    """

    compiled_bytes: int = 0
    bytes_per_token: int = 0
    max_added_bytes: int = 0
    num_accepted_tokens: int = 0
    slow_mask_seconds: float = 0.0
    is_exhausted: bool = False
    on_growth: Callable[[], None] | None = None

    @property
    def num_bytes(self) -> int:
        return self.compiled_bytes + self._max_automaton_bytes

    @property
    def automaton_bytes(self) -> int:
        """Estimated bytes that the automaton has gained, from the time of masks.

        It depends on the processor's speed, and is mostly far below the bound in ``num_bytes``.
        """
        return min(automaton_bytes(self.slow_mask_seconds), self._max_automaton_bytes)

    @property
    def _max_automaton_bytes(self) -> int:
        return min(self.num_accepted_tokens * self.bytes_per_token, self.max_added_bytes)

    def record_mask(self, slow_seconds: float) -> None:
        """Add a mask's seconds to ``slow_mask_seconds``, and call ``on_growth`` if it is due."""
        num_bytes = self.automaton_bytes
        self.slow_mask_seconds += slow_seconds
        if self.on_growth is not None and self.automaton_bytes >> 20 > num_bytes >> 20:
            self.on_growth()


@dataclass(slots=True, eq=False)
class MaskSpeed:
    """Record of the speed of a grammar's masks, for all its outputs together.

    Attributes:
        num_quick_masks: number of quick masks since the last slow one.
        is_known_slow: whether the last mask was slow.
        may_jump: whether a mask may take far longer than all before it, however many were quick.
    """

    num_quick_masks: int = 0
    is_known_slow: bool = False
    may_jump: bool = False

    @property
    def is_known_quick(self) -> bool:
        return self.num_quick_masks >= MIN_QUICK_MASKS and not self.may_jump

    def record(self, *, is_slow: bool) -> None:
        self.num_quick_masks = 0 if is_slow else self.num_quick_masks + 1
        self.is_known_slow = is_slow


@dataclass(frozen=True, slots=True)
class Grammar:
    """Compiled grammar, shared by requests.

    Attributes:
        new_matcher: makes a matcher for a new output; takes microseconds; any thread may call it.
        special_token_ids: ids of the special tokens that the grammar may contain.
        memory: memory that the grammar shares with its matchers.
        first_mask: mask of the first token of every output; None if it is not known.
        mask_speed: speed of the masks. The engine thread updates it.
    """

    new_matcher: Callable[[], GrammarMatcher]
    special_token_ids: Collection[int] = ()
    memory: GrammarMemoryBound = field(default_factory=GrammarMemoryBound)
    first_mask: bytes | None = None
    mask_speed: MaskSpeed = field(default_factory=MaskSpeed)


class GrammarBackend(Protocol):
    """Compiler of grammars for one vocabulary, with one library."""

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """Compile a grammar. It may take long, so GrammarCompiler calls it on its own threads.

        Raises:
            GrammarError: if the backend cannot compile it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary of a model, with its tokens as bytes.

    Attributes:
        tokens: by token id, the bytes that the token adds to a text; empty if it is never allowed.
        special_tokens: names by id of the special tokens that a grammar may contain.
        encode: function of the tokenizer from text to token ids.
    """

    tokens: list[bytes]
    special_tokens: dict[int, str]
    encode: Callable[[str], list[int]]

    @property
    def mask_size(self) -> int:
        """Number of bytes of a mask, which consists of 32-bit words with one bit per token."""
        return -(-len(self.tokens) // 32) * 4

    def clear_padding(self, mask: bytes) -> bytearray:
        """Copy of a backend's mask without the bits beyond the vocabulary; a backend may set one
        for its own end token."""
        cut = bytearray(mask[: self.mask_size])
        size = len(self.tokens)
        if size % 32:
            cut[size >> 3] &= (1 << (size & 7)) - 1
        return cut


MAX_WHITESPACE_CHARACTERS = 1
"""Maximum number of white-space characters between two tokens of JSON. If indentation is allowed, a
small model may write little else."""

WHITESPACE_PATTERN = f"[ \\n\\r\\t]{{0,{MAX_WHITESPACE_CHARACTERS}}}"
"""Regular expression of the white space between two tokens of JSON."""
