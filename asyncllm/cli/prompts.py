"""Prompts of the demo: tasks that suit the small model in the package."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_QUESTION_CONTEXT = (
    "Nora put the key under the mat. Ben likes soup. Ida lives in Porto. Tom has a red kite."
)
_JSON_CONTEXT = "Nora is 34 years old and lives in Porto."
_PERSON_NAMES = "Mia Tom Lena Otto Ruby Max Ida Finn Alice Hugo Nina Theo".split()
_TOY_NAMES = "boat kite lamp drum map clock train violin bell robot".split()


@dataclass(frozen=True)
class Prompt:
    """One conversation that the model continues.

    Attributes:
        kind: kind of the task, for the heading.
        short_question: shorter text for the title; empty if ``question`` is the title.
        is_long: whether the answer is a longer text. A short answer is right or wrong, so it is
            sampled greedily.
        history: earlier messages of the conversation.
        tools: JSON schemas of tools for the chat template.
    """

    kind: str
    question: str
    short_question: str = ""
    is_long: bool = False
    history: tuple[dict[str, str], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def title(self) -> str:
        return self.short_question or self.question

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        return (*self.history, {"role": "user", "content": self.question})


def make_prompts(count: int, rng: random.Random) -> list[Prompt]:
    """Make ``count`` prompts: first the fixed ones, then random ones."""
    chosen = list(_fixed_prompts())[:count]
    makers = (_story_prompt, _story_prompt, _addition_prompt, _colour_prompt, _json_prompt)
    while len(chosen) < count:
        chosen.append(rng.choice(makers)(rng))
    return chosen


def _fixed_prompts() -> tuple[Prompt, ...]:
    """The demo's first prompts, of every kind. Two begin with one context, and share its KV."""
    return (
        Prompt("story", "Tell me a story about Mia and a boat.", is_long=True),
        Prompt("story", "Write a short story about Tom and a kite.", is_long=True),
        Prompt("question", f"{_QUESTION_CONTEXT} Where is the key?", "Where is the key?"),
        Prompt("sum", "What is 12 + 7?"),
        Prompt(
            "JSON",
            f'Fill in this JSON: {{"name": "", "age": 0, "city": ""}}\n{_JSON_CONTEXT}',
            _JSON_CONTEXT,
        ),
        Prompt(
            "chat",
            "What is my name?",
            history=(
                {"role": "user", "content": "My name is Lena."},
                {"role": "assistant", "content": "Nice to meet you, Lena."},
            ),
        ),
        Prompt("tool call", "What is the weather in Oslo?", tools=(_weather_tool(),)),
        Prompt("question", f"{_QUESTION_CONTEXT} Who likes soup?", "Who likes soup?"),
    )


def _weather_tool() -> dict[str, Any]:
    properties = {"city": {"type": "string"}}
    function = {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": properties, "required": ["city"]},
    }
    return {"type": "function", "function": function}


def _story_prompt(rng: random.Random) -> Prompt:
    name, toy = rng.choice(_PERSON_NAMES), rng.choice(_TOY_NAMES)
    return Prompt("story", f"Tell me a story about {name} and a {toy}.", is_long=True)


def _addition_prompt(rng: random.Random) -> Prompt:
    a = rng.randint(1, 60)
    return Prompt("sum", f"What is {a} + {rng.randint(1, 99 - a)}?")


def _colour_prompt(rng: random.Random) -> Prompt:
    name, toy = rng.choice(_PERSON_NAMES), rng.choice(_TOY_NAMES)
    colour = rng.choice(("red", "blue", "green", "yellow"))
    question = f"What colour is the {toy}?"
    return Prompt("question", f"{name} has a {colour} {toy}. {question}", question)


def _json_prompt(rng: random.Random) -> Prompt:
    name, age = rng.choice(_PERSON_NAMES), rng.randint(5, 90)
    fact = f"{name} is {age} years old."
    return Prompt("JSON", f'Fill in this JSON: {{"name": "", "age": 0}}\n{fact}', fact)
