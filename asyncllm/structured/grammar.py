"""Grammar: the protocols of compiled grammars and backends, and the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from asyncllm.errors import InvalidRequestError
from asyncllm.structured.spec import StructuredOutputs


class GrammarError(Exception):
    """A grammar that a backend cannot compile: malformed, with a feature that it does not enforce,
    or beyond its limits. The message says which."""


def refuse_work(spec: StructuredOutputs, why: str) -> InvalidRequestError:
    """Error for an output whose next token takes the parser more work than a request may cause."""
    what = f"{spec.param}.{spec.kind}" if spec.param == "structured_outputs" else spec.param
    return InvalidRequestError(
        f"{what}: too complex for the next token, expected fewer alternatives at a time: {why}",
        param=spec.param,
    )


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF rather than Lark: a line defines a rule with ``::=``. Lark's
    ``start:`` is no test, because it may also be ``?start:`` or ``start[…]:``; and Lark may have
    ``::=`` within a string or comment."""
    return re.search(r"(?m)^\s*[\w-]+\s*::=", text) is not None


class GrammarMatcher(Protocol):
    """State of one output in a compiled grammar; used by one thread at a time.

    It sees tokens as text, and special tokens only if the grammar names them; StructuredOutput
    handles EOS and stop tokens. Any method may raise, which ends its request alone.
    """

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False if the grammar does not allow it here."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        ...

    def bitmask(self) -> bytearray:
        """Mask of the tokens that may come next, in the layout of ``GrammarMask``. The caller may
        change it. No bit beyond the vocabulary is set."""
        ...

    def may_end(self) -> bool:
        """Whether the output so far is complete."""
        ...

    def is_terminated(self) -> bool:
        """Whether the output is complete, and nothing more can come."""
        ...


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, shared by requests.

    Attributes:
        new_matcher: makes a matcher at the beginning; takes microseconds, any thread.
        special: ids of the special tokens that a grammar may name.
    """

    new_matcher: Callable[[], GrammarMatcher]
    special: Collection[int] = ()


class GrammarBackend(Protocol):
    """A library that compiles grammars for one vocabulary."""

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """Compile a grammar. May take long; called on a thread of the compiler.

        Raises:
            GrammarError: if the backend cannot compile it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model as bytes.

    Attributes:
        tokens: by id, the bytes that a token adds to a text; empty for one that is never allowed.
        special: id to name of the special tokens that a grammar may name.
        encode: the tokenizer's function from text to token ids.
    """

    tokens: list[bytes]
    special: dict[int, str]
    encode: Callable[[str], list[int]]

    @property
    def mask_size(self) -> int:
        """Bytes of a mask: 32-bit words with one bit per token."""
        return -(-len(self.tokens) // 32) * 4

    def cut(self, mask: bytes) -> bytearray:
        """Mask of a backend without bits beyond the vocabulary, such as that of its end token."""
        cut = bytearray(mask[: self.mask_size])
        size = len(self.tokens)
        if size % 32:
            cut[size >> 3] &= (1 << (size & 7)) - 1
        return cut


WHITESPACE = "[ \\n\\r\\t]"
MAX_WHITESPACE = 1
"""Most white-space characters between two parts of JSON. Given room for indentation, a small model
writes little else."""
