"""TokenRules: the tokens that ``allowed_token_ids`` and ``bad_words`` admit."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class BadWords:
    """Bad words of several tokens, grouped by all tokens but the last.

    These tokens are kept in reverse order, as bytes of 32-bit integers: a tree of objects would
    take forty times the memory.

    Attributes:
        beginnings: the words without their last token, each once, sorted.
        last_tokens: for each beginning, the last tokens of its words.
        shorter: for each beginning, the index of the longest other one that it starts with, or -1.
        preceding_tokens: first tokens of the beginnings; after any other token no word can end.
        max_length: number of tokens of the longest beginning.
    """

    beginnings: list[bytes]
    last_tokens: list[tuple[int, ...]]
    shorter: array[int]
    preceding_tokens: frozenset[int]
    max_length: int

    @classmethod
    def create(cls, words: Iterable[Sequence[int]]) -> BadWords | None:
        """Group words of at least two tokens; None for no words."""
        last_tokens: dict[bytes, list[int]] = {}
        preceding_tokens: set[int] = set()
        for *earlier_tokens, last in words:
            preceding_tokens.add(earlier_tokens[-1])
            beginning = array("i", reversed(earlier_tokens)).tobytes()
            last_tokens.setdefault(beginning, []).append(last)
        if not last_tokens:
            return None
        beginnings = sorted(last_tokens)
        shorter, prefixes = array("i"), [-1]
        for index, beginning in enumerate(beginnings):
            while prefixes[-1] >= 0 and not beginning.startswith(beginnings[prefixes[-1]]):
                prefixes.pop()
            shorter.append(prefixes[-1])
            prefixes.append(index)
        return cls(
            beginnings,
            [tuple(last_tokens[beginning]) for beginning in beginnings],
            shorter,
            frozenset(preceding_tokens),
            max(map(len, beginnings)) // shorter.itemsize,
        )

    def excluded_tokens(self, output: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word after ``output``."""
        excluded: list[int] = []
        if not len(output) or int(output[-1]) not in self.preceding_tokens:
            return excluded
        import numpy as np

        end = np.asarray(output[: -self.max_length - 1 : -1], np.int32).tobytes()
        # In sorted order, all strings from a prefix of ``end`` up to ``end`` start with it.
        index = bisect_right(self.beginnings, end) - 1
        while index >= 0 and not end.startswith(self.beginnings[index]):
            index = self.shorter[index]
        while index >= 0:
            excluded += self.last_tokens[index]
            index = self.shorter[index]
        return excluded


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """Token rules of a request, prepared when it is submitted and shared by all its outputs.

    If they were prepared only when an output enters a step, a list as long as the vocabulary would
    delay the step by 12 ms.

    Attributes:
        allowed_mask: mask of the tokens that ``allowed_token_ids`` and single-token bad words
            allow, in the format of a GrammarMask; None if they allow all.
        bad_words: bad words of several tokens; None without them.
    """

    allowed_mask: bytes | None
    bad_words: BadWords | None

    @classmethod
    def create(
        cls,
        allowed_token_ids: Sequence[int] | None,
        bad_words: Iterable[Sequence[int]],
        vocab_size: int,
    ) -> TokenRules | None:
        """Prepare the token rules of a request; None if it has none.

        Raises:
            IndexError: for a token id outside the vocabulary.
        """
        words = tuple(bad_words)
        single_tokens = [word[0] for word in words if len(word) == 1]
        longer_words = BadWords.create(word for word in words if len(word) > 1)
        if allowed_token_ids is None and not single_tokens and longer_words is None:
            return None
        allowed = None
        if allowed_token_ids is not None or single_tokens:
            import numpy as np  # Not with ``import asyncllm``, which is to be quick.

            bits = np.full(-(-vocab_size // 32) * 32, allowed_token_ids is None)
            # An array of the standard library takes integers in a third of numpy's time.
            bits[np.asarray(array("Q", allowed_token_ids or ()))] = True
            bits[np.asarray(single_tokens, np.int64)] = False
            allowed = np.packbits(bits, bitorder="little").tobytes()
        return cls(allowed, longer_words)
