"""Questions about one to four sentences."""

from __future__ import annotations

from dataclasses import dataclass

from . import facts, words
from .phrase import pick, say, upper_first

TRAIN_FRAMES = (
    "{facts} {q}", "{facts} {q}", "{facts} {q}", "{facts} {q}", "{facts} {q}", "{facts}\n{q}",
    "{facts}\n\n{q}", "Read this: {facts} {q}", "Read the text.\n{facts}\n{q}",
    "Answer the question. {facts} {q}", "{facts}\nQuestion: {q}", "Here is a text: {facts} {q}",
    "[Listen:|Look:|I tell you something.|Here are some facts.] {facts} {q}",
    "[Please answer:|Answer this:|A question for you.|I have a question.] {facts} {q}",
    "{facts} Now [tell me|answer]: {q}", "{facts} [So|Now|My question is]: {q}",
    "Text: {facts} Question: {q}", "{q}\n{facts}", "[Question:|] {q} {facts}",
)
LATE_FRAMES = (
    "[Text|Note|News|Story|Tale|Example|Hint|Puzzle|Riddle|Task|Given|Info|Report]: {facts} {q}",
    "[Hello|Hi|Good morning|Good day|Hey][.|!] {facts} {q}", "[Remember this|Know this|Think about "
    "it|Mind this|Learn this|See here|Imagine this|Suppose this|Notice][:|.] {facts} {q}",
    "[We know this|This is true|It is so|I heard this|They say this|"
    "My friend says][:|.] {facts} {q}",
    "{facts} [Please answer|Please say|Say it|Think well|Quick|A question|Answer|Please]: {q}",
    "{facts} [Well|Good|Please|OK|Then], {l}", "[Use|Take|Consider|Study] [this|the] "
    "[text|note|line][:|.|:\n] {facts} {q}",
    "{facts} {q} [Answer now.|Please answer.|Thank you.|Thanks.|Be brief.]",
)
HELD_FRAMES = (
    "Here is a question for you. {facts} {q}", "Please read the text: {facts} {q}",
    "Facts: {facts} {q}", "{facts} Answer me: {q}", "Look at this text.\n{facts}\n{q}",
)
_MORE = ("{q}", "{q}", "And {l}", "[OK.|Good.|Thanks.|Thank you.|Right.] {q}", "[Now|Next]: {q}")


@dataclass(frozen=True)
class Passage:
    """A few sentences and everything that can be asked about them."""

    text: str
    asks: tuple[tuple[facts.Ask, dict[str, str]], ...]


def draw_passage(bank: words.Bank, count: int) -> Passage:
    """``count`` facts in which every question has one answer."""
    rng = bank.rng
    names = [name.text for name in bank.names(2 * count)]
    kinds = sorted(facts.KINDS)
    same = rng.random() < 0.5
    first = rng.choice(kinds)
    sentences: list[str] = []
    asks: list[tuple[facts.Ask, dict[str, str]]] = []
    used: set[str] = set()
    seen_kinds: set[str] = set()
    for at in range(count):
        kind = first if same else rng.choice(kinds)
        mine = names[2 * at : 2 * at + 2]
        if at and kind in ("lives", "likes", "job", "age") and kind not in seen_kinds:
            if rng.random() < 0.3:
                mine = [names[0], mine[1]]
        seen_kinds.add(kind)
        while True:
            slots = facts.fill(bank, mine)
            values = {slots[key] for key in ("t", "y", "s", "f", "j", "k", "p", "an", "c", "d")}
            if not values & used:
                break
        used |= values
        told = rng.choice(facts.KINDS[kind].tells)
        sentence = say(rng, told, **slots)
        if bank.late and sentences and rng.random() < 0.2 and " and " not in sentences[-1]:
            if not told.startswith(("{n}", "{m}", "I ")):
                sentence = sentence[0].lower() + sentence[1:]
            sentences[-1] += rng.choice((" and ", " and ", " and ", ", and ", ", but "))
            sentences[-1] = sentences[-1].replace(". ", " ").replace(".,", ",") + sentence
        else:
            sentences.append(sentence)
        asks += [(ask, slots) for ask in facts.KINDS[kind].asks]
    return Passage(" ".join(upper_first(text) for text in sentences), tuple(asks))


def conversation(bank: words.Bank) -> list[tuple[str, str]]:
    """A passage with one or several questions, as pairs of question and answer."""
    rng = bank.rng
    passage = draw_passage(bank, rng.choice((1, 2, 2, 2, 3, 3, 3, 3, 4)))
    most = rng.choice((1, 2, 3, 4, 5, 6) if bank.late else (1, 1, 2, 3, 4, 5))
    asks = rng.sample(passage.asks, min(len(passage.asks), most))
    turns = []
    for at, (ask, slots) in enumerate(asks):
        text = pick(rng, ask.train, **slots)
        if rng.random() < 0.1:
            text = text.rstrip("?.")
        if at == 0:
            frames = LATE_FRAMES if bank.late and rng.random() < 0.35 else TRAIN_FRAMES
            asked = text[0].lower() + text[1:]
            text = pick(rng, frames, facts=passage.text, q=text, l=asked).strip()
        else:
            text = pick(rng, _MORE, q=text, l=text[0].lower() + text[1:])
        turns.append((text, ask.answer.format(**slots)))
    return turns


def examination(bank: words.Bank, count: int) -> tuple[str, str]:
    """One question over ``count`` facts in wordings that training never saw, and its answer."""
    rng = bank.rng
    passage = draw_passage(bank, count)
    ask, slots = rng.choice(passage.asks)
    text = pick(rng, ask.held, **slots)
    if rng.random() < 0.5:
        return f"{passage.text} {text}", ask.answer.format(**slots)
    return pick(rng, HELD_FRAMES, facts=passage.text, q=text), ask.answer.format(**slots)
