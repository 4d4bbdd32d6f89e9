"""Documents as padded batches of a few fixed shapes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from .corpus import Pieces

LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
_GROUP = 2048
Row = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class Batch:
    """Token ids, the flat positions to learn at, what follows there, and how much it counts."""

    ids: np.ndarray
    at: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def _encode(tokenizer: Tokenizer, documents: Iterable[Pieces]) -> list[Row]:
    found: list[Row] = []
    waiting: list[Pieces] = []

    def flush() -> None:
        texts = [text for pieces in waiting for text, _ in pieces]
        coded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for pieces in waiting:
            ids: list[int] = []
            learn: list[bool] = []
            for _, wanted in pieces:
                part = next(coded).ids
                ids += part
                learn += [wanted] * len(part)
            found.append((ids, learn))
        waiting.clear()

    for document in documents:
        waiting.append(document)
        if len(waiting) == _GROUP:
            flush()
    flush()
    return found


def _batch(rows: list[Row], length: int) -> Batch:
    ids = np.zeros((len(rows), length), np.int64)
    at, targets, weights = [], [], []
    for row, (tokens, learn) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        places = [place for place in range(1, len(tokens)) if learn[place]]
        at += [row * length + place - 1 for place in places]
        targets += [tokens[place] for place in places]
        # A story has thirty times the tokens of a short answer but is not worth as much more.
        weights += [len(places) ** -0.5] * len(places)
    return Batch(ids, np.array(at), np.array(targets), np.array(weights, np.float32))


def make(
    tokenizer: Tokenizer, documents: Iterable[Pieces], tokens: int, seed: str
) -> list[Batch]:
    """Batches of about ``tokens`` positions, each of documents of like length, in mixed order."""
    classes: dict[int, list[Row]] = {length: [] for length in LENGTHS}
    for ids, learn in _encode(tokenizer, documents):
        for length in LENGTHS:
            if len(ids) <= length:
                classes[length].append((ids, learn))
                break
    batches = []
    for length, rows in classes.items():
        size = tokens // length
        # A rest that fills no batch is left out, so that each length has one compiled shape.
        for start in range(0, len(rows) - size + 1, size):
            batches.append(_batch(rows[start : start + size], length))
    random.Random(seed).shuffle(batches)
    return batches
