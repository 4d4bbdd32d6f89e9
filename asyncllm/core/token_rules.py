"""TokenRules: the tokens that ``allowed_token_ids`` and ``bad_words`` admit."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain


@dataclass(frozen=True, slots=True, eq=False)
class BadWords:
    """Bad words of several tokens, grouped by all tokens but the last: by their beginnings.

    They are one int32 array, which native code reads as well: a tree of objects would take forty
    times the memory. The array has the number of beginnings; where the tokens of each start, and
    the end; where its last tokens start, and the end; for each beginning, the index of the longest
    other one that it starts with, or -1; the tokens of the beginnings; the last tokens. Beginnings
    are in reverse order, and sorted by their bytes.

    Attributes:
        packed: the array.
        preceding_tokens: first tokens of the beginnings; after any other token no word can end.
        max_length: number of tokens of the longest beginning.
    """

    packed: bytes
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
        lengths = [len(beginning) // shorter.itemsize for beginning in beginnings]
        last = [last_tokens[beginning] for beginning in beginnings]
        header = array("i", [len(beginnings), *accumulate(lengths, initial=0)])
        header.extend(accumulate(map(len, last), initial=0))
        ends = array("i", chain.from_iterable(last))
        packed = b"".join((header.tobytes(), shorter.tobytes(), *beginnings, ends.tobytes()))
        return cls(packed, frozenset(preceding_tokens), max(lengths))

    def excluded_tokens(self, output: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word after ``output``."""
        excluded: list[int] = []
        if not len(output) or int(output[-1]) not in self.preceding_tokens:
            return excluded
        import numpy as np

        end = np.asarray(output[: -self.max_length - 1 : -1], np.int32).tobytes()
        numbers = memoryview(self.packed).cast("i")
        count = numbers[0]
        starts, last_starts = numbers[1 : count + 2], numbers[count + 2 : 2 * count + 3]
        shorter, tokens = numbers[2 * count + 3 : 3 * count + 3], numbers[3 * count + 3 :]
        last_tokens = tokens[starts[count] :]

        def beginning(index: int) -> bytes:
            return tokens[starts[index] : starts[index + 1]].tobytes()

        # In sorted order, all strings from a prefix of ``end`` up to ``end`` start with it.
        index = bisect_right(range(count), end, key=beginning) - 1
        while index >= 0 and not end.startswith(beginning(index)):
            index = shorter[index]
        while index >= 0:
            excluded += last_tokens[last_starts[index] : last_starts[index + 1]].tolist()
            index = shorter[index]
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
