"""The tokenizer: byte-level pieces that keep names and digits the same everywhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import chat

VERSION = tokenizers.__version__
# A name or a noun has the same pieces in prose, in JSON and at the start of an answer because its
# space stands alone, so that copying it never takes knowing how it is spelt; only the words that
# are never copied keep theirs. Digits stand alone so that sums can be learnt digit by digit.
PATTERN = r" {words}(?![a-z])|[a-z]+|[A-Z][a-z]*|\d|\n+| ?[^\sA-Za-z\d]+|[^\S\n]+"


def frequent(texts: Iterable[str], count: int, besides: Collection[str]) -> list[str]:
    """The words that most often follow a space, but none of ``besides``."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(r" ([a-z]+)", text))
    found = sorted(counts, key=lambda word: (-counts[word], word))
    return sorted([word for word in found if word not in besides][:count])


def alternatives(spelt: Iterable[str]) -> str:
    """A pattern for words that shares their beginnings, which matches three times as fast as
    all of them in a row."""
    tails: dict[str, list[str]] = {}
    for word in sorted(spelt):
        tails.setdefault(word[:1], []).append(word[1:])
    ends = tails.pop("", None) is not None
    branches = [head + alternatives(rest) for head, rest in tails.items()]
    if not branches:
        return ""
    if len(branches) == 1 and not ends:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if ends else ''}"


def train(texts: Iterable[str], size: int, spaced: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of ``size`` tokens; ``spaced`` are words that keep their space."""
    tokenizer = Tokenizer(models.BPE())
    pattern = PATTERN.format(words=alternatives(spaced))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(chat.MARKS),
        special_tokens=list(chat.SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in chat.MARKS])
    return tokenizer


def pieces(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The tokens that are letters only, as words: each has to be copied in training."""
    found = {
        tokenizer.decode([at]).strip() for at in range(tokenizer.get_vocab_size())
        if at >= len(chat.SPECIAL)
    }
    return tuple(sorted(word for word in found if re.fullmatch("[A-Za-z]+", word)))


def load(path: Path) -> Tokenizer:
    """The tokenizer of a file."""
    return Tokenizer.from_file(str(path))
