"""token_bytes: computes the bytes that each token of a vocabulary adds to a text."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers

from asyncllm.text.control_tokens import list_component_stages, unk_token_ids
from asyncllm.text.text_decoder import REPLACEMENT_CHARACTER, TokenPieceTable, make_token_table


def token_bytes(
    backend: tokenizers.Tokenizer, skipped_ids: frozenset[int], vocab_size: int
) -> list[bytes]:
    """Bytes of each token id below ``vocab_size``, in the middle of a text.

    A token has no bytes if it is in ``skipped_ids`` (special tokens), is outside the vocabulary, is
    the unknown token, or has text that depends on its neighbours.
    """
    skipped_ids |= unk_token_ids(backend)
    id_to_bytes = make_id_to_bytes(backend, skipped_ids)
    if id_to_bytes is not None:
        return [id_to_bytes(token_id) for token_id in range(vocab_size)]
    return _decode_each_token(backend, skipped_ids, vocab_size)


def make_id_to_bytes(
    backend: tokenizers.Tokenizer, skipped_ids: frozenset[int] = frozenset()
) -> Callable[[int], bytes] | None:
    """Function from token id to its bytes; None if these depend on the neighbouring tokens."""
    table = make_token_table(
        list_component_stages(backend.decoder), backend.id_to_token, skipped_ids
    )
    if isinstance(table, TokenPieceTable):
        return lambda i: bytes([p]) if isinstance(p := table[i], int) else p.encode()
    return None if table is None else table.__getitem__


def _decode_each_token(
    backend: tokenizers.Tokenizer, skipped_ids: frozenset[int], vocab_size: int
) -> list[bytes]:
    """Token bytes for a decoder without a table.

    Each token is decoded after each of two context tokens. If it adds the same text after both,
    this text is its bytes; else its bytes are empty.
    """
    bytes_by_id: list[bytes | None] = [None] * vocab_size
    known_ids = [
        i for i in range(vocab_size) if i not in skipped_ids and backend.id_to_token(i) is not None
    ]
    for context_id in _context_token_ids(backend, known_ids):
        before = backend.decode([context_id], skip_special_tokens=False)
        pairs = [[context_id, token_id] for token_id in known_ids]
        for token_id, text in zip(
            known_ids, backend.decode_batch(pairs, skip_special_tokens=False), strict=True
        ):
            added = text[len(before) :] if text.startswith(before) else ""
            data = b"" if REPLACEMENT_CHARACTER in added else added.encode()
            bytes_by_id[token_id] = data if bytes_by_id[token_id] in (None, data) else b""
    return [data or b"" for data in bytes_by_id]


def _context_token_ids(backend: tokenizers.Tokenizer, known_ids: list[int]) -> list[int]:
    """Ids of the first two tokens that consist of letters; if there are none, the first two ids."""
    letters = [i for i in known_ids if (backend.id_to_token(i) or "").isalpha()]
    return (letters or known_ids)[:2]
