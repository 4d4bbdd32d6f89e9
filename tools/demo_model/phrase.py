"""Sentences with choices: ``[a|b]`` picks one of several, ``{slot}`` is filled in."""

from __future__ import annotations

import random
import re

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def say(rng: random.Random, text: str, /, **slots: object) -> str:
    """Choose among the alternatives of ``text``, innermost first, and fill its slots."""
    while (found := _CHOICE.search(text)) is not None:
        picked = rng.choice(found.group(1).split("|"))
        text = text[: found.start()] + picked + text[found.end() :]
    return text.format(**slots) if slots else text


def pick(rng: random.Random, texts: tuple[str, ...], /, **slots: object) -> str:
    """One of several sentences, with its own choices made and its slots filled."""
    return say(rng, rng.choice(texts), **slots)


def upper_first(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def roughen(rng: random.Random, text: str, typos: float = 0.15) -> str:
    """What a hurried person types: lower case, no full stop, now and then a slip."""
    if rng.random() < 0.4:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.3:
        text = text.rstrip(".!?")
    if rng.random() < typos and len(text) > 6:
        at = rng.randrange(1, len(text) - 2)
        if text[at].isalpha() and text[at + 1].isalpha():
            kind = rng.randrange(3)
            if kind == 0:
                text = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
            elif kind == 1:
                text = text[:at] + text[at + 1 :]
            else:
                text = text[:at] + text[at] + text[at:]
    return text
