"""Fuzzed tools on the packaged model, and calls that come back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from asyncllm import LLM, InvalidRequestError, RequestError
from tests.structured import random_schema


def broken(tool: Any, rng: random.Random) -> Any:
    """A tool with some of its JSON replaced, or as text that may still be JSON."""
    text = list(json.dumps(tool))
    for _ in range(rng.randint(1, 3)):
        text[rng.randrange(len(text))] = rng.choice('{}[]":,0x')
    try:
        return json.loads("".join(text))
    except ValueError:
        return "".join(text)


def random_tool(rng: random.Random) -> Any:
    parameters = {"type": "object", "properties": {"a": random_schema(rng)}, "required": ["a"]}
    if rng.random() < 0.2:
        odd = [{"$ref": "#"}, {"pattern": "(a+)+$"}, {"pattern": "("}, {"uniqueItems": True}, True,
               {"type": "array", "items": {"$ref": "#/properties/b"}, "minItems": 1},
               {"enum": list(range(3000))}, {"maxLength": 10**9, "type": "string"}]  # fmt: skip
        parameters["properties"]["b"] = rng.choice(odd)
    tool = {"type": "function", "function": {"name": f"f{rng.randrange(3)}"}}
    tool["function"]["parameters"] = parameters
    return broken(tool, rng) if rng.random() < 0.4 else tool


def fuzzed_tools(seeds: range) -> None:
    """An error or an output, and a neighbour's output is the same."""
    with LLM(max_num_seqs=8, grammar_timeout=5) as llm:
        plain = llm.generate("z", max_tokens=8, temperature=0).token_ids
        params: set[str | None] = set()
        others = calls = 0
        for seed in seeds:
            rng = random.Random(seed)
            tools = [random_tool(rng) for _ in range(rng.randint(1, 3))]
            choice = rng.choice(["auto", "required", "required"])
            neighbour = llm.stream("z", max_tokens=8, temperature=0)
            try:
                found = llm.chat(
                    [{"role": "user", "content": "x"}],
                    tools=tools,
                    tool_choice=choice,
                    n=rng.choice([1, 1, 2]),
                    seed=seed,
                    max_tokens=60,
                )
                for output in found.outputs:
                    calls += len(output.tool_calls)
            except InvalidRequestError as error:
                params.add(error.param)
            except RequestError:
                others += 1  # too long a prompt, say
            assert neighbour.result().token_ids == plain
        assert params == {"tools"}
        assert calls > others


def test_fuzzed_tools_end_their_own_request_alone() -> None:
    fuzzed_tools(range(12))


@pytest.mark.slow
def test_many_fuzzed_tools_end_their_own_request_alone() -> None:
    fuzzed_tools(range(100, 300))
