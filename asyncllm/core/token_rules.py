"""TokenRules: the tokens that ``allowed_token_ids`` and ``bad_words`` admit."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """Token rules of a request, prepared when it is submitted and shared by all its outputs.

    If they were prepared only when an output enters a step, a list as long as the vocabulary would
    delay the step by 12 ms.

    Attributes:
        allowed_mask: mask of the tokens that ``allowed_token_ids`` and single-token bad words
            allow, in the format of a GrammarMask; None if they allow all.
        bad_words: trie of the bad words of several tokens, each without its last token and in
            reverse order: maps ``(node, token)`` to the child node. The root is node 0.
        last_tokens: by trie node, last tokens of the bad words whose path ends at the node.
    """

    allowed_mask: bytes | None
    bad_words: dict[tuple[int, int], int]
    last_tokens: dict[int, list[int]]

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
        trie: dict[tuple[int, int], int] = {}
        last_tokens: dict[int, list[int]] = {}
        single_tokens: list[int] = []
        for *earlier_tokens, last in bad_words:
            node = 0
            for token in reversed(earlier_tokens):
                node = trie.setdefault((node, token), len(trie) + 1)
            (last_tokens.setdefault(node, []) if earlier_tokens else single_tokens).append(last)
        if allowed_token_ids is None and not single_tokens and not trie:
            return None
        allowed = None
        if allowed_token_ids is not None or single_tokens:
            import numpy as np  # Not with ``import asyncllm``, which is to be quick.

            bits = np.full(-(-vocab_size // 32) * 32, allowed_token_ids is None)
            # An array of the standard library takes integers in a third of numpy's time.
            bits[np.asarray(array("Q", allowed_token_ids or ()))] = True
            bits[np.asarray(single_tokens, np.int64)] = False
            allowed = np.packbits(bits, bitorder="little").tobytes()
        return cls(allowed, trie, last_tokens)

    def excluded_tokens(self, output: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word after ``output``."""
        excluded: list[int] = []
        node: int | None = 0
        for i in range(len(output) - 1, -1, -1):
            node = self.bad_words.get((node, int(output[i])))
            if node is None:
                break
            excluded += self.last_tokens.get(node, ())
        return excluded
