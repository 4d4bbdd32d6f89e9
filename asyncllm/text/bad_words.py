"""bad_words_token_ids: converts ``bad_words`` to token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm import validation as check


def bad_words_token_ids(
    words: Sequence[str], tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Convert ``bad_words`` to token sequences, as vLLM does.

    A word gives its own token sequence. The word with a space before it gives a second sequence, if
    the second one is as long as the first and begins with another token.

    Raises:
        InvalidRequestError: for a word without tokens, or with tokens beyond the model's
            vocabulary.
    """
    accepted = "texts whose tokens the model has"
    found: list[tuple[int, ...]] = []
    texts = [form for word in words for form in (word.lstrip(), " " + word.lstrip())]
    encoded = iter(tokenizer.encode_short_texts(texts))
    for word in words:
        try:
            bare, spaced = tuple(next(encoded)), tuple(next(encoded))
        except Exception as error:
            raise check.value_error(
                "bad_words", word, f"{accepted}: {check.describe_error(error)}"
            ) from error
        if not bare or max(bare) >= vocab_size:
            raise check.value_error("bad_words", word, accepted)
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0] and max(spaced) < vocab_size:
            found.append(spaced)
    return tuple(found)
