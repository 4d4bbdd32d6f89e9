"""Calling the tools on offer, and saying what they answered."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from . import sums, words
from .phrase import pick, say

NO_WEATHER = "I cannot look up the weather."
NO_TIME = "I do not know what time it is."
NO_TIMER = "I cannot set a timer."
FAILED = "Sorry, the tool did not work."


@dataclass(frozen=True)
class Shape:
    """A tool the model knows: its names, its parameters' names and its wordings."""

    names: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    type: str
    about: tuple[str, ...]
    asks: tuple[str, ...]
    held: tuple[str, ...]


SHAPES = {
    "weather": Shape(
        ("get_weather",) * 5 + ("weather", "get_current_weather", "look_up_weather"),
        (("city", "city", "city", "location", "place", "town"),), "string",
        ("[Get|Look up|Find|Return|Tell] the [current |]weather [in|of|for] a [city|place|"
         "town][.|]",
         "[Weather|The weather] [in|for] a city", "[Current|Today's] weather[ report|][.|]", ""),
        ("[What is|What's|what is|How is|how is] the weather [like |]in {v}[ today| now| right "
         "now|][?|]",
         "[Is it|Will it be] [{sky}|sunny|raining|cold|warm] in {v}[ today|]?",
         "[Tell me|Get|Look up|Find|Check|Show me|Give me] the weather [in|for|of] {v}[.|]",
         "Weather in {v}[?|, please.|]",
         "I [am going|travel|go] to {v}. How is the weather[ there|]?",
         "[Do I need|Should I take] an umbrella in {v}?",
         "[Can|Could] you [check|find|tell me|get] "
         "the weather in {v}?", "What will the weather be in {v}?",
         "How [warm|cold] is it in {v}?"),
        ("Please look up the weather in {v} now.", "Do you know how the weather in {v} is?",
         "Can you show me the weather for {v}?", "I want to know the weather in {v}.")),
    "add": Shape(
        ("add",) * 5 + ("add_numbers", "sum", "plus"),
        (("a", "a", "a", "x", "first"), ("b", "b", "b", "y", "second")), "number",
        ("[Add|Sum] [two|the] numbers[.|]", "[Add|Sum] a and b[.|]", "The sum of two numbers[.|]",
         "[Return|Get|Find|Compute] the sum[ of two numbers|][.|]", "Adds two numbers[.|]", ""),
        ("What is {a} [+|plus|and] {b}?", "{a} + {b}[ = ?|]", "[Add|Please add|Can you add] {a} "
         "[and|to] {b}[.|?|]", "[How much is|What's|what is] {a} [+|plus] {b}[?|]",
         "[What is|Tell me|Find] the sum of {a} and {b}[?|.|]", "[Calculate|Compute] {a} [+|plus] "
         "{b}[.|]", "[Use the tool to add|Sum up] {a} and {b}[.|]",
         "I have {a} and get {b} more. How many?"),
        ("Can you find the sum of {a} and {b}?", "Please calculate {a} + {b}.",
         "Tell me how much {a} plus {b} is.", "Could you add {a} and {b} for me?")),
    "time": Shape(
        ("get_time", "get_time", "time", "clock"), (("city", "place", "location", "zone"),),
         "string",
        ("[Get|Tell|Look up] the [current |]time in a city[.|]", "The time in a place", ""),
        ("What time is it in {v}?", "[Tell me|Get|Look up] the time in {v}[.|]",
         "[What is|What's] the time in {v}[?|]", "How late is it in {v}?"),
        ("Can you tell me the time in {v}?", "Please look up the time in {v}.")),
    "timer": Shape(
        ("set_timer", "timer", "start_timer"), (("minutes", "minutes", "time"),), "number",
        ("[Set|Start] a timer[.|]", "[Set|Start] a timer for some minutes[.|]", ""),
        ("[Set|Start|Please set] a timer [for|of] {k} minutes[.|]",
         "[Wake|Call] me in {k} minutes[.|]",
         "Timer[:|,] {k} minutes", "I need a timer for {k} minutes[.|]"),
        ("Can you set a timer for {k} minutes?", "Please start a timer of {k} minutes.")),
}
LATE_ADDS = (
    "[Add|Please add|Can you add|Sum up] {a} and {b} [for me|please|now|with the tool][.|?|]",
    "[What is|How much is] {a} [+|plus] {b} [please|now|in all|together][?|.|]",
)
_OTHERS = (
    ("search", "query", "[Search|Look up|Find] [something|pages] [on the web|in a book][.|]"),
    ("send_mail", "to text", "Send [a mail|an email|a message][.|]"),
    ("translate", "text language", "Translate [a text|words][.|]"),
    ("play_music", "song", "Play [a song|music][.|]"), ("open_file", "path",
     "[Open|Read] a file[.|]"),
    ("multiply", "a b", "[Multiply|The product of] two numbers[.|]"),
    ("get_news", "topic", "[Get|Read] the news[.|]"), ("book_flight", "from to day",
     "Book a flight."),
    ("convert", "amount unit", "[Convert|Change] [money|units][.|]"), ("roll_dice", "",
     "Roll a die."),
    ("get_user", "id", "[Get|Look up] a user[.|]"), ("delete", "name", "Delete [it|a file][.|]"),
)
_MAIN = ("weather",) * 5 + ("add",) * 4 + ("time", "timer")


@dataclass(frozen=True)
class Task:
    """A request, the offered tools, and the call that answers it (or none)."""

    prompt: str
    tools: list[dict]
    call: dict | None
    result: tuple[str, str] | None


def declare(rng: random.Random, kind: str, plain: bool = False) -> dict:
    """The declaration of one tool; ``plain`` uses the usual names."""
    shape = SHAPES[kind]
    names = [options[0] if plain else rng.choice(options) for options in shape.parameters]
    kind_type = "integer" if shape.type == "number" and rng.random() < 0.4 else shape.type
    properties = {name: {"type": kind_type} for name in names}
    function = {
        "name": shape.names[0] if plain else rng.choice(shape.names),
        "description": pick(rng, shape.about),
        "parameters": {"type": "object", "properties": properties, "required": names},
    }
    return {"type": "function", "function": function}


def declare_other(rng: random.Random) -> dict:
    """The declaration of a tool that no request of the training needs."""
    name, parameters, about = rng.choice(_OTHERS)
    properties = {key: {"type": rng.choice(("string", "string", "number"))}
                  for key in parameters.split()}
    function = {"name": name, "description": say(rng, about),
                "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def _arguments(bank: words.Bank, kind: str) -> list[str | int]:
    rng = bank.rng
    if kind == "add":
        if rng.random() < 0.6:
            return list(sums.draw_pair(rng, 99, bank.held))
        return list(sums.draw_big(rng, bank.held))
    if kind == "timer":
        return [rng.randint(1, 90)]
    return [bank.city()]


def _result(bank: words.Bank, kind: str, values: list[str | int]) -> tuple[str, str]:
    """What the tool may answer, and what the model says then."""
    rng = bank.rng
    if rng.random() < 0.05:
        errors = ("error", "Error: not found", "error: failed", '{"error": "failed"}')
        return rng.choice(errors), FAILED
    if kind == "add":
        total = int(values[0]) + int(values[1])
        key = rng.choice(("result", "sum", "answer", "value"))
        form = rng.choice(("{t}", "{t}", '{{"{k}": {t}}}', "The {k} is {t}.", "{k}: {t}"))
        return form.format(t=total, k=key), f"The answer is {total}."
    if kind == "timer":
        done = rng.choice(("ok", "done", '{"ok": true}', "Timer set.", '{"status": "ok"}'))
        return done, f"The timer is set for {values[0]} minutes."
    if kind == "time":
        clock = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
        form = rng.choice(("{c}", '{{"time": "{c}"}}', '{{"city": "{y}", "time": "{c}"}}'))
        return form.format(c=clock, y=values[0]), f"It is {clock} in {values[0]}."
    return _weather_result(bank, str(values[0]))


def _weather_result(bank: words.Bank, city: str) -> tuple[str, str]:
    rng = bank.rng
    sky, degrees = rng.choice(words.SKIES), rng.randint(-9, 39)
    key_sky = rng.choice(("weather", "sky", "condition", "conditions", "description"))
    key_degrees = rng.choice(("temperature", "temp", "degrees", "temperature_c", "celsius"))
    unit = rng.choice((" degrees", "°C", " C", "°"))
    shape = rng.random()
    place = {"city": city} if rng.random() < 0.3 else {}
    if shape < 0.3:
        text = rng.choice((sky, sky, json.dumps({**place, key_sky: sky}), f"It is {sky}."))
        return text, f"It is {sky} in {city}."
    if shape < 0.45:
        text = rng.choice((f"{degrees}{unit}", json.dumps({**place, key_degrees: degrees})))
        return text, f"It is {degrees} degrees in {city}."
    both = [(key_sky, sky), (key_degrees, degrees)]
    rng.shuffle(both)
    text = rng.choice((
        json.dumps({**place, **dict(both)}), json.dumps({**place, **dict(both)}),
        f"{sky}, {degrees}{unit}", f"{degrees}{unit} and {sky}", f"{degrees}{unit}, {sky}",
    ))
    return text, f"It is {sky} and {degrees} degrees in {city}."


def draw(bank: words.Bank, kind: str | None = None, plain: bool = False) -> Task:
    """A request that one of the offered tools answers."""
    rng = bank.rng
    kind = rng.choice(_MAIN) if kind is None else kind
    offered = [kind]
    if rng.random() < 0.6:
        others = [other for other in SHAPES if other != kind]
        offered += rng.sample(others, rng.choice((1, 1, 1, 2)))
        rng.shuffle(offered)
    tools = [declare(rng, name, plain) for name in offered]
    values = _arguments(bank, kind)
    slots = {"v": values[0], "a": values[0], "b": values[-1], "k": values[0],
             "sky": rng.choice(words.SKIES)}
    asks = SHAPES[kind].held if bank.held else SHAPES[kind].asks
    if bank.late and kind == "add" and rng.random() < 0.25:
        asks = LATE_ADDS
    function = tools[offered.index(kind)]["function"]
    if not plain and rng.random() < 0.2:
        tools.insert(rng.randint(0, len(tools)), declare_other(rng))
    arguments = dict(zip(function["parameters"]["properties"], values, strict=True))
    call = {"name": function["name"], "arguments": arguments}
    return Task(pick(rng, asks, **slots), tools, call, _result(bank, kind, values))


def offer_unfit(bank: words.Bank, besides: tuple[str, ...]) -> list[dict]:
    """One or two tools that are not among ``besides``."""
    fit = [kind for kind in SHAPES if kind not in besides]
    if bank.rng.random() < 0.4 or not fit:
        return [declare_other(bank.rng)]
    return [declare(bank.rng, kind) for kind in bank.rng.sample(fit, bank.rng.choice((1, 1, 2)))]


def draw_missing(bank: words.Bank) -> tuple[str, list[dict], str]:
    """A request whose tool is not offered, the other tools that are, and the honest answer."""
    rng = bank.rng
    kind = rng.choice(("weather", "weather", "time", "timer"))
    tools = offer_unfit(bank, (kind,)) if rng.random() < 0.6 else []
    asks = SHAPES[kind].held if bank.held else SHAPES[kind].asks
    value: str | int = rng.randint(1, 90) if kind == "timer" else bank.city()
    text = say(rng, rng.choice(asks), v=value, k=value, sky=rng.choice(words.SKIES))
    return text, tools, {"weather": NO_WEATHER, "time": NO_TIME, "timer": NO_TIMER}[kind]
