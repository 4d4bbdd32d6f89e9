"""Filling in a small JSON object from a sentence."""

from __future__ import annotations

import json

from . import words
from .phrase import pick, upper_first

_TELLS = {
    "name": ("{v}",),
    "age": ("is {v} years old", "is {v}", "turned {v} today"),
    "city": ("lives in {v}", "is from {v}", "comes from {v}"),
    "job": ("is {a_v}", "works as {a_v}"),
    "food": ("likes {v}", "loves {v}", "likes to eat {v}"),
    "pet": ("has {a_v} as a pet", "has a pet {v}", "owns {a_v}"),
    "colour": ("likes the colour {v}", "loves the color {v}"),
    "thing": ("bought {a_v}", "has {a_v}", "wants {a_v}"),
    "day": ("comes on {v}", "came on {v}", "will come on {v}"),
    "count": ("needs {v} of them", "bought {v} of them", "wants {v} of them"),
}
_ALIASES = {
    "city": ("city", "city", "town", "home"), "colour": ("colour", "color"),
    "thing": ("thing", "item", "object"), "count": ("count", "number", "amount"),
    "food": ("food", "dish"), "pet": ("pet", "animal"), "name": ("name", "name", "name", "person"),
}
SKELETON_ASKS = (
    "[Fill in|Complete|Fill|Please fill in] [this|the] JSON[ object|]: {json}\n{text}",
    "{text}\n[Fill in|Complete|Please fill in]: {json}", "{text} [JSON|Fill in]: {json}",
    "[Fill in the JSON|Complete the JSON|Fill in the object] [from|for] [the|this] [text|sentence]"
    ".\n{json}\n{text}",
    "{text}\n{json}", "{json}\n{text}", "Text: {text}\nJSON: {json}",
    "[Use the text|Use the sentence] to fill in {json}\n{text}",
)
KEY_ASKS = (
    "[Give me|Write|Make|Return|Answer with] [a |]JSON[ object|] with [the keys |]{keys}[.|:]\n"
    "{text}",
    "{text}\n[Give me|Write|Make|Return] [a |]JSON[ object|] with [the keys |]{keys}[.|]",
    "[Extract|Find|Get] {keys} as JSON[:|.] {text}", "{text} [Extract|Find] {keys} as JSON.",
    "[Turn this into|Put this into|Write this as] JSON with {keys}[:|.] {text}",
)
HELD_SKELETON_ASKS = (
    "Please complete the JSON from this text: {json}\n{text}",
    "{text}\nUse this to fill in the JSON: {json}",
)
HELD_KEY_ASKS = (
    "{text}\nReturn this as a JSON object with the keys {keys}.",
    "Please make JSON with {keys} from this sentence: {text}",
)


def _value(bank: words.Bank, key: str) -> str | int:
    rng = bank.rng
    if key == "age":
        return rng.randint(1, 99)
    if key == "count":
        return rng.randint(2, 99)
    draw = {
        "name": lambda: bank.name().text, "city": bank.city, "job": bank.job, "food": bank.food,
        "pet": bank.animal, "colour": bank.colour, "thing": bank.thing,
        "day": lambda: rng.choice(words.DAYS),
    }
    return draw[key]()


def _sentence(bank: words.Bank, values: dict[str, str | int], girl: bool) -> str:
    rng = bank.rng
    keys = [key for key in values if key != "name"]
    rng.shuffle(keys)
    parts = [
        pick(rng, _TELLS[key], v=values[key], a_v=words.article(str(values[key]))) for key in keys
    ]
    name = values["name"]
    if len(parts) == 1:
        return f"{name} {parts[0]}."
    if len(parts) == 2:
        form = rng.choice(("{n} {0} and {1}.", "{n} {0}. {P} {1}.", "{n} {0} and {p} {1}."))
    else:
        form = rng.choice(("{n} {0}, {1} and {2}.", "{n} {0} and {1}. {P} {2}.",
                           "{n} {0}. {P} {1} and {2}."))
    pronoun = "she" if girl else "he"
    return form.format(*parts, n=name, p=pronoun, P=upper_first(pronoun))


def draw(bank: words.Bank) -> tuple[str, str]:
    """A request for a JSON object and the object; ``bank.held`` picks the wordings."""
    rng = bank.rng
    extra = rng.sample([key for key in _TELLS if key != "name"], rng.choice((1, 2, 2, 3)))
    order = ["name", *extra]
    if rng.random() < 0.3:
        rng.shuffle(order)
    values = {key: _value(bank, key) for key in order}
    named = {key: rng.choice(_ALIASES.get(key, (key,))) for key in order}
    girl = rng.random() < 0.5
    if bank.late:
        name = bank.name()
        values["name"], girl = name.text, name.girl
    text = _sentence(bank, values, girl)
    # Sometimes fewer keys are asked for than the sentence tells.
    asked = order if rng.random() < 0.75 or len(order) < 3 else rng.sample(order, len(order) - 1)
    if rng.random() < 0.6:
        empty = {named[key]: (0 if isinstance(values[key], int) else "") for key in asked}
        asks = HELD_SKELETON_ASKS if bank.held else SKELETON_ASKS
        prompt = pick(rng, asks, json=json.dumps(empty), text=text)
    else:
        names = [named[key] for key in asked]
        keys = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
        prompt = pick(rng, HELD_KEY_ASKS if bank.held else KEY_ASKS, keys=keys, text=text)
    return prompt, json.dumps({named[key]: values[key] for key in asked})
