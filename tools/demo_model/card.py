"""The model card: what the model is, how it was made and what was measured."""

from __future__ import annotations

from pathlib import Path

from . import chat
from .heldout import GOAL, LOWER_GOALS, Generate, Score

Reports = dict[int, list[Score]]

_CARD = """\
---
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The demo model of asyncllm

A language model of {parameters:.2f} million parameters ({size:.1f} MB) that ships with asyncllm, so
that examples and tests run without a download. It has the shape of Qwen3 (`Qwen3ForCausalLM`,
{layers} layers, hidden size {hidden}, vocabulary {vocab}, tied embeddings) and reads up to
{context} tokens. It is a demonstration: outside the skills below it says that it does not know, or
talks nonsense.

## What it does

- tells a story of 60 to 150 words about whom and what the prompt names;
- answers questions about one to four short sentences in the prompt;
- adds numbers while the sum is at most 99, and says so when it is not;
- fills in a flat JSON object from a sentence;
- calls a tool it is offered when the request fits (the weather in a city, adding two numbers, the
  time in a city, a timer) and says what the tool answered;
- repeats words, makes small talk, remembers a name, a city, a food or a colour over a few turns;
- says what it is, and that it does not know other things.

It works through its chat template (with or without a system turn) and on plain text: a bare
instruction, or a beginning such as "Once upon a time". Use it greedily for anything but stories;
`generation_config.json` suggests a temperature of 0.6 for those.

## Examples

Greedy answers, as the model gave them:

{examples}

## What was measured

Names, things, cities, number pairs and wordings of these prompts do not occur in training; greedy
decoding through the engine in float32, exact match (JSON and tool calls are compared as values;
stories are checked for the name used throughout, the things asked for, no pronoun that does not
suit the name, 60 to 150 words, an end).

{table}

{short}

These two draws were made once, after the weights were fixed. Other draws were looked at while the
generators were written and before the weights were kept: seeds 11 to 14 for these weights and the
trials before them, 2026, 31337 and 424242 for older ones.
The words and wordings that are held out are the same in every draw, so the figures say how the
model does on unfamiliar words in general only as far as those words are like others.

The figures come from `python tools/train_demo_model.py`, which examines what it wrote; they are
also in `eval.json`. `tests/test_demo_model.py` repeats a part of the examination.

## How it was made

{made}
It was one run, whose plan was fixed before. Most of what was new in its text had been tried on older
weights with a few minutes of training; the tokenizer had not been tried.

All text comes from the generators in `tools/demo_model`, which were written for this model; nothing
was downloaded. About half of the names and cities are made up by rule, so that the model learns to
copy rather than to recall. After a quarter of the training more words are made up, some of them
from the vocabulary's own pieces, and the text turns to what is hard, above all questions; the rate
falls to nothing at the end (`tools/demo_model/trainer.py` has the plan).

A name alone does not tell whether its owner is a she or a he. A story says she or he of a hero whom
the prompt calls a girl or a boy, and of thirty common names; every other hero is a child (or an
animal) and is called by name.

## Limits

Made of templates, it knows only what they say: longer sentences, negations and other wordings
confuse it, and two facts joined by "and" often do. It has no knowledge of the world, its stories
follow eight plots, and it cannot take a tool of a new kind. A thing with an adjective, as in "a red
kite", confuses its stories. The number pairs that are held out include 4 + 6, and it gets that one
wrong. Beyond {context} tokens it was not trained.
"""
_PROMPTS = (
    ("Tell me a story about Mia and a boat.", None),
    ("Tom has a red kite and Anna has a blue ball. What colour is the ball?", None),
    ("Ben lives in Rome. Clara lives in Oslo. Where does Clara live?", None),
    ("What is 27 + 45?", None),
    ("What is 270 + 45?", None),
    ('Fill in this JSON: {"name": "", "age": 0, "city": ""}\nNora is 9 years old and lives in '
     "Lisbon.", None),
    ("What is the weather in Paris?", "get_weather(city: string): Get the weather in a city."),
    ("Repeat after me: seven green lanterns", None),
    ("Who are you?", None),
    ("What is the capital of France?", None),
)


def examples(generate: Generate) -> str:
    """A few prompts with the model's answers, as Markdown."""
    prompts = []
    for asked, tool in _PROMPTS:
        head = f"{chat.START}system\n<tools>\n{tool}\n</tools>{chat.END}\n" if tool else ""
        prompts.append(f"{head}{chat.render([{'role': 'user', 'content': asked}])}")
    parts = []
    for (asked, tool), said in zip(_PROMPTS, generate(prompts), strict=True):
        offered = f"Tool on offer: {tool}\n" if tool else ""
        parts.append(f"```text\n{offered}user: {asked}\nmodel: {said}\n```")
    return "\n\n".join(parts)


def table(reports: Reports) -> str:
    """The scores as a Markdown table."""
    lines = [
        "| skill | " + " | ".join(f"seed {seed}" for seed in reports) + " |",
        "| --- |" + " --- |" * len(reports),
    ]
    for scores in zip(*reports.values(), strict=True):
        figures = " | ".join(f"{score.right} of {score.total}" for score in scores)
        lines.append(f"| {scores[0].skill} | {figures} |")
    return "\n".join(lines)


def short_of(reports: Reports) -> str:
    """Which skills fell short of their goal, in which draw."""
    weak = [
        f"{score.skill} ({score.rate:.1%}, seed {seed})"
        for seed, scores in reports.items() for score in scores
        if score.rate < LOWER_GOALS.get(score.skill, GOAL)
    ]
    goal = "nine in ten (questions over three facts: eight in ten)"
    if not weak:
        return f"Every skill reached {goal} in both draws."
    return f"Short of {goal} fell: " + ", ".join(weak) + "."


def write(folder: Path, config: dict, made: str, reports: Reports, shown: str) -> None:
    """Write the card beside the weights."""
    size = (folder / "model.safetensors").stat().st_size
    text = _CARD.format(
        parameters=size / 2e6, size=size / 1e6, layers=config["num_hidden_layers"],
        hidden=config["hidden_size"], vocab=config["vocab_size"],
        context=config["max_position_embeddings"], examples=shown,
        table=table(reports), short=short_of(reports), made=made,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
