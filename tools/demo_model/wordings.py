"""Which wordings the training can say, to show that the examination's are not among them."""

from __future__ import annotations

import re

from . import calls, facts, objects, questions, stories, sums, talk

_TOKEN = re.compile(r"\{\w+\}|[\[\]|]|[^\[\]|{}]+|[{}]")


def normal(text: str) -> str:
    """The text without case, outer punctuation and spare spaces."""
    text = re.sub(r"\s+", " ", text.lower()).strip()
    return re.sub(r"[^\w{}]+$", "", text)


def pattern(template: str) -> re.Pattern[str]:
    """What a template of the training can say, slots standing for slots."""
    out = []
    depth = 0
    for token in _TOKEN.findall(template):
        if token == "[":
            out.append("(?:")
            depth += 1
        elif token == "]":
            out.append(")")
            depth -= 1
        elif token == "|" and depth:
            out.append("|")
        elif token.startswith("{") and len(token) > 1:
            out.append(r"\{\w+\}")
        else:
            out.append(re.escape(token.lower()))
    return re.compile("".join(out) + r"[.!?]?", re.DOTALL)


def pairs() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """By skill, the wordings of the training and those of the examination."""
    asks = [ask for kind in facts.KINDS.values() for ask in kind.asks]
    found = {f"question {at}": (ask.train, ask.held) for at, ask in enumerate(asks)}
    found |= {f"topic {name}": (topic.train, topic.held) for name, topic in talk.TOPICS.items()}
    found |= {f"tool {name}": (shape.asks, shape.held) for name, shape in calls.SHAPES.items()}
    for name, memory in talk.MEMORIES.items():
        found[f"telling {name}"] = (memory.tells, memory.held_tells)
        found[f"asking {name}"] = (memory.asks, memory.held_asks)
    found |= {
        "frame": (questions.TRAIN_FRAMES + questions.LATE_FRAMES, questions.HELD_FRAMES),
        "sum": (sums.TRAIN_ASKS, sums.HELD_ASKS), "no sum": (sums.TRAIN_OTHER, sums.HELD_OTHER),
        "late adding": (calls.LATE_ADDS, calls.SHAPES["add"].held),
        "skeleton": (objects.SKELETON_ASKS, objects.HELD_SKELETON_ASKS),
        "keys": (objects.KEY_ASKS, objects.HELD_KEY_ASKS),
        "story": (stories.TRAIN_ASKS, stories.HELD_ASKS),
        "repeat": (talk.REPEAT_ASKS + talk.LATE_REPEAT, talk.HELD_REPEAT),
        "unknown": (talk.UNKNOWN_ASKS + talk.LATE_UNKNOWN, talk.HELD_UNKNOWN),
    }
    return found


def shared() -> list[str]:
    """Wordings of the examination that the training can say: there must be none."""
    found = []
    for skill, (train, held) in pairs().items():
        patterns = [pattern(text) for text in train]
        for text in held:
            plain = text.lower()
            if any(one.fullmatch(plain) or one.fullmatch(normal(plain)) for one in patterns):
                found.append(f"{skill}: {text}")
    return found
