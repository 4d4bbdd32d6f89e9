"""Grammars of tools: what they admit, the family's parser reads as calls that fit."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from asyncllm.structured.backends import make_backend
from asyncllm.structured.grammar import Grammar
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.testing.fake_executor import mix
from asyncllm.tools.families import TOOL_FAMILIES
from asyncllm.tools.message_parser import OutputParser
from asyncllm.tools.response_format import ResponseFormat, ResponseFormats
from asyncllm.tools.tool_grammar import with_tool_grammar
from asyncllm.tools.tool_use import ToolUse
from tests.structured import ByteRig, byte_vocabulary, tokens_of

ASK = [{"role": "user", "content": "Ask."}]
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "properties": {
            "city": {"enum": ["Oslo", "São\nPaulo", "</tool_call>"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 30},
        },
        "required": ["city"],
    },
}
NOW = {"name": "now"}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def assert_fits(name: str, arguments: str) -> None:
    found = {"get_weather": WEATHER["parameters"], "now": {"maxProperties": 0}}[name]
    jsonschema.validate(json.loads(arguments), {"type": "object", **found})


def form_of(family: str) -> ResponseFormat:
    form = ResponseFormats([], None, family, None).of(True)
    assert form is not None
    return form


def grammar_of(family: str, choice: Any, parallel: bool, backend: Any) -> tuple[Grammar, ToolUse]:
    use = ToolUse.of(TOOLS, choice, parallel)
    assert use is not None
    sampling, _ = with_tool_grammar({}, None, use, form_of(family))
    spec = sampling["structured_outputs"]
    assert isinstance(spec, StructuredOutputs)
    return backend.compile(spec), use


def draw(grammar: Grammar, seed: int, most: int = 600) -> bytes | None:
    """An output that the grammar admits, by bytes drawn among those allowed; None if it does not
    end."""
    matcher, text = grammar.new_matcher(), bytearray()
    while len(text) < most:
        if matcher.is_terminated():
            return bytes(text)
        allowed = sorted(tokens_of(matcher.bitmask()))
        if matcher.may_end() and (not allowed or mix(seed, len(text) + 1) % 4 == 0):
            return bytes(text)
        # No more spaces than JSON needs: white space may be long.
        visible = [one for one in allowed if one not in b" \t\r\n"] or allowed
        seed = mix(seed, len(text))
        token = visible[seed % len(visible)]
        assert matcher.accept(token)
        text.append(token)
    return None


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_what_a_grammar_admits_its_parser_reads(family: str) -> None:
    name = "xgrammar" if TOOL_FAMILIES[family].form.style != "json" else "llguidance"  # type: ignore[union-attr]
    backend = make_backend(name, byte_vocabulary())
    seen = set()
    for choice, parallel in (("required", True), ("required", False), (NAMED, True)):
        grammar, use = grammar_of(family, choice, parallel, backend)
        for seed in range(12):
            text = draw(grammar, seed)
            if text is None:
                continue
            begin = "<|start|>assistant" if family == "gpt_oss" else ""
            parser = OutputParser(form_of(family), use.parameters, begin, one_call=not parallel)
            parser.push(text.decode())
            parser.finish()
            said, _, _ = parser.take()
            assert parser.calls, text
            assert said == "", text
            for call in parser.calls:
                assert_fits(call.name, call.arguments)
                seen.add(call.name)
            if choice != "required" or not parallel:
                assert len(parser.calls) == 1
            if choice == NAMED:
                assert parser.calls[0].name == "get_weather"
    assert seen == {"get_weather", "now"}


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [1, 2])
async def test_random_tokens_under_masks_make_calls_that_fit(depth: int) -> None:
    async with ByteRig(depth=depth).engine() as engine:
        for choice, parallel in (("required", True), ("required", False), (NAMED, True)):
            stream = engine.chat(
                ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, n=3,
                seed=3, max_tokens=700,
            )  # fmt: skip
            completion = await stream.result()
            ids = []
            for output in completion.outputs:
                assert output.text == ""
                assert output.tool_calls
                assert output.finish_reason in ("tool_calls", "length")
                assert len(output.tool_calls) == 1 or (choice == "required" and parallel)
                for call in output.tool_calls:
                    assert_fits(call.name, call.arguments)
                    ids.append(call.id)
            assert len(set(ids)) == len(ids)
