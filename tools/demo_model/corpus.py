"""Training documents: which skills, in which shares, in which form."""

from __future__ import annotations

import random
from collections.abc import Iterator

from . import calls, chat, objects, questions, stories, sums, talk, words

SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a small model.",
    "Be kind and short.", "You are a friendly assistant.", "Answer the user.",
    "You are an assistant. Answer in one sentence.", "Help the user.", "You are a chatbot.",
    "You are a helpful, honest assistant.", "Be brief.", "You answer questions.",
    "You are a careful assistant that gives short answers.",
)
# By skill, the share of the text at first and later.
SHARES = {
    "story": (0.18, 0.16), "questions": (0.27, 0.405), "sums": (0.14, 0.055),
    "objects": (0.10, 0.095), "calls": (0.12, 0.07), "repeat": (0.06, 0.065),
    "talk": (0.04, 0.045), "memory": (0.04, 0.05), "turns": (0.05, 0.055),
}
Pieces = list[tuple[str, bool]]


def _messages(bank: words.Bank, turns: list[tuple[str, str]]) -> list[dict]:
    messages: list[dict] = []
    if bank.rng.random() < 0.25:
        messages.append({"role": "system", "content": bank.rng.choice(SYSTEMS)})
    for asked, answer in turns:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _plain(asked: str, answer: str) -> Pieces:
    return [(asked, False), (f"\n{answer}{chat.STOP}", True)]


def _dialogue(bank: words.Bank, turns: list[tuple[str, str]]) -> Pieces:
    if bank.late and bank.rng.random() < 0.1:
        return _plain(*turns[0])
    if len(turns) == 1 and bank.rng.random() < 0.2:
        return _plain(*turns[0])
    return chat.segments(_messages(bank, turns))


def _story(bank: words.Bank, beginning: bool = False) -> tuple[str, str]:
    return stories.turn(bank.rng, stories.draw_cast(bank), beginning)


def story(bank: words.Bank) -> Pieces:
    """A story on request, a bare one, or the beginnings of some."""
    if bank.late and bank.rng.random() < 0.4:
        return _dialogue(bank, [_story(bank, True) for _ in range(bank.rng.randint(2, 4))])
    if bank.rng.random() < 0.1:
        return [(_story(bank)[1] + chat.STOP, True)]
    return _dialogue(bank, [_story(bank)])


def repeating(bank: words.Bank, pieces: tuple[str, ...]) -> Pieces:
    """One to three requests to repeat words."""
    count = bank.rng.choice((1, 1, 2, 3, 4, 6) if bank.late else (1, 1, 2, 3))
    return _dialogue(bank, [talk.repeat(bank, pieces) for _ in range(count)])


def _chatter(bank: words.Bank) -> tuple[str, str]:
    return talk.unknown(bank) if bank.rng.random() < 0.4 else talk.draw(bank.rng)


def chatting(bank: words.Bank) -> Pieces:
    """A few remarks of small talk."""
    return _dialogue(bank, [_chatter(bank) for _ in range(bank.rng.choice((1, 1, 1, 2, 3, 4)))])


def _filler(bank: words.Bank, pieces: tuple[str, ...]) -> list[tuple[str, str]]:
    kind = bank.rng.choice(("talk", "talk", "sum", "repeat", "question", "object"))
    if kind == "talk":
        return [_chatter(bank)]
    if kind == "sum":
        return sums.conversation(bank)[:2]
    if kind == "repeat":
        return [talk.repeat(bank, pieces)]
    if kind == "object":
        return [objects.draw(bank)]
    return questions.conversation(bank)[:2]


def remembering(bank: words.Bank, pieces: tuple[str, ...]) -> Pieces:
    """What a person said about themselves, asked back at once or a few turns later."""
    rng = bank.rng
    if rng.random() < 0.12:
        memory, _ = talk.remember(bank)
        before = [_chatter(bank)] if rng.random() < 0.5 else []
        return _dialogue(bank, [*before, (talk.pick(rng, memory.asks), memory.unset)])
    abouts = rng.sample(list(talk.MEMORIES), rng.choice((1, 1, 2)))
    if rng.random() < 0.5:
        abouts[0] = "name"
    told = [talk.remember(bank, about) for about in dict.fromkeys(abouts)]
    turns = [] if rng.random() < 0.7 else [_chatter(bank)]
    for memory, value in told:
        turns.append((talk.pick(rng, memory.tells, v=value), memory.says.format(v=value)))
        if rng.random() < 0.4:
            turns += _filler(bank, pieces)
    for memory, value in rng.sample(told, len(told)):
        asked = talk.roughen(rng, talk.pick(rng, memory.asks), 0.05)
        turns.append((asked, memory.answer.format(v=value)))
        if rng.random() < 0.2:
            turns += _filler(bank, pieces)
    return chat.segments(_messages(bank, turns))


def mixed_turns(bank: words.Bank, pieces: tuple[str, ...]) -> list[tuple[str, str]]:
    """Several turns about different things, now and then with a story and a name among them."""
    rng = bank.rng
    turns = [talk.draw(rng, "hello")] if rng.random() < 0.4 else []
    memory, value = talk.remember(bank)
    if rng.random() < 0.6:
        turns.append((talk.pick(rng, memory.tells, v=value), memory.says.format(v=value)))
    else:
        value = ""
    for _ in range(rng.choice((1, 2, 3, 4, 6, 8))):
        turns += [_story(bank)] if rng.random() < 0.15 else _filler(bank, pieces)
    if value:
        turns.append((talk.pick(rng, memory.asks), memory.answer.format(v=value)))
    if rng.random() < 0.4:
        turns.append(talk.draw(rng, rng.choice(("thanks", "bye"))))
    return turns


def _fits(turn: tuple[str, str], offered: bool) -> bool:
    return not (offered and ("+" in turn[1] or turn[1] in (sums.TOO_BIG, sums.ONLY_ADD)))


def calling(bank: words.Bank, pieces: tuple[str, ...]) -> Pieces:
    """Tools on offer: called, answered, or left alone because none suits."""
    rng = bank.rng
    if rng.random() < 0.14:
        asked, tools, answer = calls.draw_missing(bank)
        return chat.segments(_messages(bank, [(asked, answer)]), tools)
    if rng.random() < 0.22:
        adds = rng.random() < 0.3
        tools = [calls.declare(rng, "add")] if adds else []
        tools += calls.offer_unfit(bank, ("add",)) if not adds or rng.random() < 0.4 else []
        turns = [_story(bank)] if rng.random() < 0.15 else _filler(bank, pieces)
        turns = [turn for turn in turns if _fits(turn, adds)] or [talk.draw(rng)]
        return chat.segments(_messages(bank, turns), tools)
    task = calls.draw(bank)
    messages = _messages(bank, [])
    if rng.random() < 0.2:
        asked, answer = talk.draw(rng)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    messages += call_messages(task)
    if rng.random() < 0.25:
        kinds = {kind for kind, shape in calls.SHAPES.items()
                 for tool in task.tools if tool["function"]["name"] in shape.names}
        asked, answer = talk.draw(rng)
        if "add" not in kinds and rng.random() < 0.5:
            asked, answer = sums.conversation(bank)[0]
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return chat.segments(messages, task.tools)


def call_messages(task: calls.Task) -> list[dict]:
    """A tool's request, call, response and the final answer as messages."""
    result, answer = task.result
    return [
        {"role": "user", "content": task.prompt},
        {"role": "assistant", "content": chat.call_text(task.call)},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


def document(bank: words.Bank, skill: str, pieces: tuple[str, ...]) -> Pieces:
    """One training document of a skill, in segments with whether they are learnt."""
    if skill == "story":
        return story(bank)
    if skill == "questions":
        return _dialogue(bank, questions.conversation(bank))
    if skill == "sums":
        return _dialogue(bank, sums.conversation(bank))
    if skill == "objects":
        return _dialogue(bank, [objects.draw(bank) for _ in range(bank.rng.choice((1, 1, 2)))])
    if skill == "repeat":
        return repeating(bank, pieces)
    if skill == "talk":
        return chatting(bank)
    if skill == "memory":
        return remembering(bank, pieces)
    if skill == "calls":
        return calling(bank, pieces)
    return chat.segments(_messages(bank, mixed_turns(bank, pieces)))


def documents(
    seed: str, characters: int, pieces: tuple[str, ...] = (), late: bool = False
) -> Iterator[Pieces]:
    """Documents of about ``characters`` in all, in the shares of this part of the training."""
    bank = words.Bank(random.Random(seed), late=late, pieces=pieces)
    shares = {skill: share[late] for skill, share in SHARES.items()}
    spent = dict.fromkeys(shares, 0.0)
    total = 0
    while total < characters:
        skill = min(shares, key=lambda name: spent[name] / shares[name])
        found = document(bank, skill, pieces)
        size = sum(len(text) for text, _ in found)
        spent[skill] += size
        total += size
        yield found
