"""token_bytes: computes the bytes that each token of a vocabulary adds to a text."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers

from asyncllm.text.control_tokens import component_stages, unknown_ids
from asyncllm.text.text_decoder import REPLACEMENT, PieceTable, make_table


def token_bytes(
    backend: tokenizers.Tokenizer, skipped_ids: frozenset[int], size: int
) -> list[bytes]:
    """Bytes of each token id below ``size``, in the middle of a text.

    A token has no bytes if it is in ``skipped_ids`` (special tokens), is outside the vocabulary, is
    the unknown token, or has text that depends on its neighbours.
    """
    skipped_ids |= unknown_ids(backend)
    bytes_of = token_table(backend, skipped_ids)
    if bytes_of is not None:
        return [bytes_of(token_id) for token_id in range(size)]
    return _decode_each(backend, skipped_ids, size)


def token_table(
    backend: tokenizers.Tokenizer, skipped_ids: frozenset[int] = frozenset()
) -> Callable[[int], bytes] | None:
    """Function from token id to its bytes; None if these depend on the neighbouring tokens."""
    table = make_table(component_stages(backend.decoder), backend.id_to_token, skipped_ids)
    if isinstance(table, PieceTable):
        return lambda i: bytes([p]) if isinstance(p := table[i], int) else p.encode()
    return None if table is None else table.__getitem__


def _decode_each(
    backend: tokenizers.Tokenizer, skipped_ids: frozenset[int], size: int
) -> list[bytes]:
    """Token bytes for a decoder without a table.

    Each token is decoded after each of two anchor tokens. Its bytes are the text that it adds if
    that is the same after both; else they are empty.
    """
    bytes_by_id: list[bytes | None] = [None] * size
    known = [i for i in range(size) if i not in skipped_ids and backend.id_to_token(i) is not None]
    for anchor in _anchor_ids(backend, known):
        before = backend.decode([anchor], skip_special_tokens=False)
        pairs = [[anchor, token_id] for token_id in known]
        for token_id, text in zip(
            known, backend.decode_batch(pairs, skip_special_tokens=False), strict=True
        ):
            added = text[len(before) :] if text.startswith(before) else ""
            data = b"" if REPLACEMENT in added else added.encode()
            bytes_by_id[token_id] = data if bytes_by_id[token_id] in (None, data) else b""
    return [data or b"" for data in bytes_by_id]


def _anchor_ids(backend: tokenizers.Tokenizer, known: list[int]) -> list[int]:
    """Ids of the first two tokens that consist of letters; if there are none, the first two ids."""
    letters = [i for i in known if (backend.id_to_token(i) or "").isalpha()]
    return (letters or known)[:2]
