"""Grammar, and the backends that compile them: the protocol, and what goes into it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from asyncllm.structured.spec import StructuredOutputs


class GrammarError(Exception):
    """The backend cannot compile it: it is malformed, asks for what the backend does not
    enforce, or is past its limits. The message names what."""


def is_gbnf(text: str) -> bool:
    """Whether a grammar defines a rule as GBNF does. Lark may begin in other ways than ``start:``,
    as ``?start:`` and ``start[…]:``, and may have ``::=`` in a text or a comment."""
    return re.search(r"(?m)^\s*[\w-]+\s*::=", text) is not None


class GrammarMatcher(Protocol):
    """State of one output in a compiled grammar; used by one thread at a time.

    It knows tokens as text, and special tokens where the grammar names them. EOS and stop tokens
    are StructuredOutput's. Any method may raise, which ends its request alone.
    """

    def accept(self, token_id: int) -> bool:
        """Advances by a token; False if the grammar does not allow it here."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens accepted."""
        ...

    def bitmask(self) -> bytearray:
        """The tokens that may come next, as ``GrammarMask`` has them; the caller's own. No bit
        past the vocabulary is set."""
        ...

    def may_end(self) -> bool:
        """Whether the output so far is complete."""
        ...

    def is_terminated(self) -> bool:
        """Whether it is complete, and nothing more can come."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by requests.

    Attributes:
        special: ids of the special tokens that it may name.
    """

    special: Collection[int]

    def new_matcher(self) -> GrammarMatcher:
        """At its beginning; some microseconds, any thread."""
        ...


class GrammarBackend(Protocol):
    """A library that compiles grammars for one vocabulary."""

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """May take long; on a thread of its own.

        Raises:
            GrammarError: see there.
        """
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model as bytes.

    Attributes:
        tokens: by id what each adds to a text; nothing for what is never allowed in one.
        special: id to name of the special tokens, which a grammar may ask for by name.
        encode: text to token ids, as the tokenizer has it.
    """

    tokens: list[bytes]
    special: dict[int, str]
    encode: Callable[[str], list[int]]

    @property
    def mask_size(self) -> int:
        """Bytes of a mask: 32-bit words with a bit per token."""
        return -(-len(self.tokens) // 32) * 4

    def cut(self, mask: bytes) -> bytearray:
        """A backend's mask without the token behind the vocabulary that ends a grammar."""
        cut = bytearray(mask[: self.mask_size])
        size = len(self.tokens)
        if size % 32:
            cut[size >> 3] &= (1 << (size & 7)) - 1
        return cut


WHITESPACE = "[ \\n\\r\\t]"
MAX_WHITESPACE = 1
"""Characters between two parts of JSON. With room for indentation a small model writes little
else."""
