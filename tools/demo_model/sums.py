"""Adding small numbers, and saying so when a sum is too big."""

from __future__ import annotations

import random

from . import words
from .phrase import pick

TOO_BIG = "That is too big for me."
ONLY_ADD = "I can only add small numbers."
LIMIT = 99
_DIGITS = "zero one two three four five six seven eight nine ten eleven twelve".split()
TRAIN_ASKS = (
    "What is {a} + {b}?", "What is {a} + {b}?", "{a} + {b}", "{a} + {b} = ?", "{a}+{b}", "{a}+{b}=",
    "[what is|whats|what's|What's] {a} [+|plus] {b}[?|]", "What is {a} plus {b}?",
    "[How much is|how much is|How much makes|What makes] {a} [+|plus|and] {b}[?|]",
    "[Add|Please add|Can you add|add|Could you add] {a} [and|to|plus] {b}[.|?|]",
    "[What is|Tell me|Give me|Find|What's] the sum of {a} and {b}[?|.|]",
    "[Calculate|Compute|Solve|Work out|Count] {a} [+|plus] {b}[.|]", "{a} plus {b}[?|]",
    "[What do you get|What do I get] [when|if] you add {a} and {b}?", "{a} and {b} [make|is] what?",
    "I have {a} [apples|coins|books|cards|eggs] and get {b} more. How many [do I have|are there]?",
    "{n} has {a} [apples|coins|books|cards|balls] and [gets|finds|buys] {b} more. How many does "
    "{n} have?",
    "There are {a} [birds|cats|boats|cars] and {b} more come. How many are there?",
    "[Do you know|Can you tell me] what {a} [+|plus] {b} is?", "[Sum|Total] of {a} and {b}",
)
HELD_ASKS = (
    "Can you work out {a} + {b}?", "Tell me what {a} plus {b} makes.", "Please compute {a} + {b}.",
    "Could you find the sum of {a} and {b}?", "How many is {a} plus {b}?",
    "{n} has {a} eggs and buys {b} more. How many are there?",
)
TRAIN_OTHER = (
    "What is {a} [-|minus|times|*|x|/|divided by] {b}?", "{a} [-|*|x|/] {b}",
    "[How much is|Calculate|Work out] {a} [-|minus|times|*|divided by] {b}[?|]",
    "[Subtract|Multiply|Divide] {a} [and|by|from] {b}[.|]", "What is the square root of {a}?",
    "[Take {b} from {a}|Double {a}|What is half of {a}][.|?|]",
)
HELD_OTHER = (
    "Please calculate {a} times {b}.", "Can you work out {a} - {b}?",
    "Please multiply {a} and {b}.",
)


def held_pair(a: int, b: int) -> bool:
    """Whether this pair of numbers, in either order, is kept for the examination."""
    low, high = sorted((a, b))
    return words.is_held(f"{low}+{high}")


def draw_pair(rng: random.Random, limit: int, held: bool) -> tuple[int, int]:
    """Two numbers whose sum is at most ``limit``."""
    while True:
        total = rng.randint(2, limit)
        a = rng.randint(0, total)
        if held_pair(a, total - a) == held:
            return a, total - a


def draw_big(rng: random.Random, held: bool) -> tuple[int, int]:
    """Two numbers whose sum is more than 99."""
    while True:
        high = rng.choice((99, 99, 200, 999, 9999))
        a, b = rng.randint(1, high), rng.randint(1, high)
        if a + b > LIMIT and held_pair(a, b) == held:
            return (a, b) if rng.random() < 0.5 else (b, a)


def _answer(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}." if a + b <= LIMIT else TOO_BIG


def conversation(bank: words.Bank) -> list[tuple[str, str]]:
    """One or several sums, as pairs of question and answer."""
    rng = bank.rng
    turns = []
    count = rng.choice((1, 1, 2, 3, 4, 5))
    while len(turns) < count:
        kind = rng.random()
        if kind < 0.06:
            a, b = rng.randint(1, 99), rng.randint(1, 30)
            turns.append((pick(rng, TRAIN_OTHER, a=a, b=b), ONLY_ADD))
            continue
        if kind < (0.22 if bank.late else 0.18):
            a, b = draw_big(rng, False)
        else:
            a, b = draw_pair(rng, 20 if kind < 0.42 else LIMIT, False)
        if bank.late and rng.random() < 0.1:
            a, b = a % 21, 0
            if held_pair(a, b):
                continue
            a, b = (a, b) if rng.random() < 0.5 else (b, a)
        left, right = str(a), str(b)
        if max(a, b) <= 12 and rng.random() < 0.15:
            left, right = _DIGITS[a], _DIGITS[b]
        text = pick(rng, TRAIN_ASKS, a=left, b=right, n=bank.name().text)
        turns.append((text, _answer(a, b)))
    return turns


def examination(bank: words.Bank, limit: int) -> tuple[str, str]:
    """One sum of numbers and in words that training never saw."""
    a, b = draw_pair(bank.rng, limit, True)
    return pick(bank.rng, HELD_ASKS, a=a, b=b, n=bank.name().text), _answer(a, b)


def big_examination(bank: words.Bank) -> tuple[str, str]:
    """One sum out of range, or something else than a sum."""
    rng = bank.rng
    a, b = draw_big(rng, True)
    if rng.random() < 0.3:
        return pick(rng, HELD_OTHER, a=a % 90, b=b % 90), ONLY_ADD
    return pick(rng, HELD_ASKS[:5], a=a, b=b), TOO_BIG
