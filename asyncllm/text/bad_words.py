"""bad_words_token_ids: texts that an output must not contain, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm import validation as check


def bad_words_token_ids(
    words: Sequence[str], tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of ``bad_words``, as in vLLM: each as it is, and behind a space if that makes
    another sequence of the same length.

    Raises:
        InvalidRequestError: for one that has no tokens, or some that the model has not.
    """
    accepted = "texts whose tokens the model has"
    found: list[tuple[int, ...]] = []
    for word in words:
        try:
            bare, spaced = (
                tuple(tokenizer.encode(text, add_special_tokens=False))
                for text in (word.lstrip(), " " + word.lstrip())
            )
        except Exception as error:
            raise check.invalid("bad_words", word, f"{accepted}: {check.explain(error)}") from error
        if not bare or max(bare) >= vocab_size:
            raise check.invalid("bad_words", word, accepted)
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0] and max(spaced) < vocab_size:
            found.append(spaced)
    return tuple(found)
