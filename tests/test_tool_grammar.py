"""Grammars of tools, against the family's parser."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from asyncllm import LLM, InvalidRequestError
from asyncllm.structured.backends import make_backend
from asyncllm.structured.grammar import Grammar, Vocabulary
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.testing import fake_engine
from asyncllm.testing.fake_executor import hash_pair
from asyncllm.tool_calls.chat_syntax import ChatSyntax, ChatSyntaxes
from asyncllm.tool_calls.families import TOOL_CALL_FAMILIES
from asyncllm.tool_calls.message_parser import OutputParser
from asyncllm.tool_calls.tool_grammar import with_tool_grammar
from asyncllm.tool_calls.tool_use import ToolUse
from tests.refusals import refused
from tests.structured import ByteRig, byte_vocabulary, tokens_of
from tests.thinking_engine import ONE, add

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


def form_of(family: str) -> ChatSyntax:
    form = ChatSyntaxes([], None, family, None).syntax_for(True)
    assert form is not None
    assert form.call_syntax is not None
    return form


def use_of(tools: list[Any], choice: Any = "auto", parallel: bool = True) -> ToolUse:
    found = ToolUse.parse(tools, choice, parallel)
    assert found is not None
    return found


def compiled(use: ToolUse, family: str, backend: Any) -> tuple[Grammar, bool]:
    """The grammar of a use of tools, and whether text is free under it."""
    sampling, free = with_tool_grammar({}, None, use, form_of(family))
    spec = sampling["structured_outputs"]
    assert isinstance(spec, StructuredOutputs)
    return backend.compile(spec), free


def draw(grammar: Grammar, seed: int, most: int = 600) -> bytes | None:
    """An output that the grammar admits, by bytes drawn among those allowed; None if it does not
    end."""
    matcher, text = grammar.new_matcher(), bytearray()
    while len(text) < most:
        if matcher.is_terminated():
            return bytes(text)
        allowed = sorted(tokens_of(matcher.bitmask()))
        if matcher.may_end() and (not allowed or hash_pair(seed, len(text) + 1) % 4 == 0):
            return bytes(text)
        # No more spaces than JSON needs: white space may be long.
        visible = [one for one in allowed if one not in b" \t\r\n"] or allowed
        seed = hash_pair(seed, len(text))
        token = visible[seed % len(visible)]
        assert matcher.accept(token)
        text.append(token)
    return None


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
def test_parser_reads_what_its_grammar_admits(family: str) -> None:
    name = "xgrammar" if form_of(family).call_syntax.style != "json" else "llguidance"
    backend = make_backend(name, byte_vocabulary())
    seen = set()
    for choice, parallel in (("required", True), ("required", False), (NAMED, True)):
        use = use_of(TOOLS, choice, parallel)
        grammar, _ = compiled(use, family, backend)
        for seed in range(12):
            text = draw(grammar, seed)
            if text is None:
                continue
            begin = "<|start|>assistant" if family == "gpt_oss" else ""
            parser = OutputParser(
                form_of(family), use.parameter_schemas, begin, one_call=not parallel
            )
            parser.push(text.decode())
            parser.finish()
            said, _, _ = parser.take_increments()
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


@pytest.mark.parametrize(
    "options",
    [{"tool_choice": "required"}, {"tool_choice": NAMED}, {"parallel_tool_calls": False}],
)
def test_the_packaged_model_makes_calls_that_fit(options: Any) -> None:
    with LLM() as llm:
        for question in ("What is the weather in Oslo?", "Who are you?"):
            messages = [{"role": "user", "content": question}]
            completion = llm.chat(messages, tools=TOOLS, n=3, seed=5, max_tokens=200, **options)
            for output in completion.outputs:
                assert output.tool_calls or "parallel_tool_calls" in options
                assert len(output.tool_calls) < 2 or options["tool_choice"] == "required"
                for call in output.tool_calls:
                    assert_fits(call.name, call.arguments)
            calls = [call for output in completion.outputs for call in output.tool_calls]
            assert len({call.id for call in calls}) == len(calls)


async def test_an_answer_in_a_form_or_calls() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    answers = iter([json.dumps({"a": ONE}), ONE, "No."])
    async with fake_engine(lambda _: next(answers)) as engine:
        stream = engine.chat(
            ASK, tools=[add], n=3, max_tokens=400,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )  # fmt: skip
        first, second, third = (await stream.result()).outputs
    assert json.loads(first.text) == {"a": ONE}
    assert first.tool_calls == ()
    assert (second.text, [call.name for call in second.tool_calls]) == ("", ["add"])
    assert not third.text.startswith("No.")


async def test_one_call_at_most() -> None:
    answers = iter([f"Hm. {ONE}\n{ONE}", "Just text.", f'x<tool_call>{{"name": "add"{ONE}'])
    async with fake_engine(lambda _: next(answers)) as engine:
        stream = engine.chat(ASK, tools=[add], parallel_tool_calls=False, n=3, max_tokens=300)
        first, second, third = (await stream.result()).outputs
    assert (first.text, [call.name for call in first.tool_calls]) == ("Hm.", ["add"])
    assert (second.text, second.tool_calls) == ("Just text.", ())
    assert third.text.startswith("x")
    assert all(call.name == "add" for call in third.tool_calls)


def admits(grammar: Grammar, text: str) -> bool:
    matcher = grammar.new_matcher()
    return all(matcher.accept(token) for token in text.encode()) and matcher.may_end()


@pytest.mark.parametrize(
    "family", [name for name in TOOL_CALL_FAMILIES if name not in ("gpt_oss", "qwen3_coder")]
)
def test_optional_strict_tool_call_has_valid_arguments(family: str) -> None:
    form = form_of(family).call_syntax
    backend = make_backend("llguidance", byte_vocabulary())
    grammar, free = compiled(use_of([{**WEATHER, "strict": True}, NOW]), family, backend)

    def call(name: str, arguments: str) -> str:
        written = form.begin.replace("NAME", name) + arguments + form.end
        return form.prefix + written + form.suffix

    assert free
    assert admits(grammar, "Hm.")
    assert admits(grammar, call("get_weather", '{"city":"Oslo","days":3}'))
    assert admits(grammar, "Hm. " + call("now", '{"in":["Oslo",1]}'))
    for name, arguments in (
        ("get_weather", '{"city":"Bonn"}'),
        ("get_weather", '{"city":"Oslo","more":1}'),
        ("now", "[1]"),
        ("then", "{}"),
    ):
        assert not admits(grammar, call(name, arguments))


def test_strict_tools_without_enforceable_schema_are_refused() -> None:
    strict, free = ([{**WEATHER, "strict": strict}] for strict in (True, False))
    with refused("tools", "strict=true with tool_choice='auto'"):
        with_tool_grammar({}, None, use_of(strict), form_of("gpt_oss"))
    assert with_tool_grammar({}, None, use_of(free), form_of("gpt_oss")) == ({}, True)
    with pytest.raises(InvalidRequestError, match=r"function\.strict: has 'yes', expected true"):
        use_of([{**WEATHER, "strict": "yes"}])


async def test_a_model_that_would_break_a_strict_schema_does_not() -> None:
    call = (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": 5, "days": 99}}\n</tool_call>'
    )
    for strict, arguments in ((False, {"city": 5, "days": 99}), (True, None)):
        async with fake_engine(f"Hm. {call}") as engine:
            tools = [{**WEATHER, "strict": strict}]
            completion = await engine.chat(ASK, tools=tools, max_tokens=300).result()
        assert completion.text.strip() == "Hm."
        (found,) = completion.tool_calls
        if arguments is None:
            assert_fits(found.name, found.arguments)
        else:
            assert json.loads(found.arguments) == arguments


@pytest.mark.parametrize("family", ["hermes", "llama3_json"])
@pytest.mark.parametrize("tail", ["", " x"])
def test_single_call_parser_reads_second_call_as_text(family: str, tail: str) -> None:
    form = form_of(family).call_syntax
    call = form.begin.replace("NAME", "now") + "{}" + form.end
    text = call + form.separator + call + tail
    for size in (1, 3, 999):
        parser = OutputParser(form_of(family), {"now": {}}, "", one_call=True)
        for begin in range(0, len(text), size):
            parser.push(text[begin : begin + size])
        parser.finish()
        said, _, _ = parser.take_increments()
        assert [call.name for call in parser.calls] == ["now"]
        assert said.strip() == text[len(call) :].strip()


def test_special_tokens_replace_delimiters_of_their_name() -> None:
    names = {256: "[TOOL_CALLS]", 257: "[ARGS]", 258: "<|im_end|>"}
    tokens = byte_vocabulary(b"", b"", b"").tokens
    backend = make_backend("llguidance", Vocabulary(tokens, names, lambda t: list(t.encode())))
    grammar, _ = compiled(use_of(TOOLS, NAMED), "mistral_v11", backend)
    matcher = grammar.new_matcher()
    for token in (256, *b"get_weather", 257, *b'{"city":"Oslo"}'):
        assert token in tokens_of(matcher.bitmask())
        assert matcher.accept(token)
    assert matcher.may_end()
    free, _ = compiled(use_of(TOOLS, "auto", False), "mistral_v11", backend)
    matcher = free.new_matcher()
    for token in (*b"Hm. ", 256):
        assert {256, ord("[")} <= tokens_of(matcher.bitmask())
        assert not {257, 258} & tokens_of(matcher.bitmask())
        assert matcher.accept(token)
    assert tokens_of(matcher.bitmask()) == {ord("g"), ord("n")}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"not": {"type": "string"}}, "tools: the keyword 'not' is not enforced"),
        ({"enum": []}, "tools: "),
    ],
)
async def test_unenforced_schema_is_refused_by_name(schema: Any, says: str) -> None:
    tools = [{"name": "now", "parameters": {"properties": {"x": schema}, "required": ["x"]}}]
    async with ByteRig().engine(structured_outputs_backend="llguidance") as engine:
        with refused("tools", says):
            await engine.chat(ASK, tools=tools, tool_choice="required").result()
        free = await engine.chat(ASK, tools=tools, max_tokens=2).result()
        assert len(free.token_ids) == 2


async def test_a_style_that_one_backend_has_names_it() -> None:
    options = {"tool_call_parser": "qwen3_coder", "structured_outputs_backend": "llguidance"}
    async with ByteRig().engine(**options) as engine:
        with pytest.raises(InvalidRequestError, match=r"'qwen_xml' takes .*asyncllm\[xgrammar\]"):
            await engine.chat(ASK, tools=TOOLS, tool_choice="required").result()


async def test_complete_outputs_end_one_by_one() -> None:
    """A grammar that can go on nowhere ends an output without a token: ``complete``, for each
    member of a group, with the last of which the group ends."""
    scripts = iter(["aaa", "b", "ab", "aaac"])
    async with fake_engine(lambda _: next(scripts)) as engine:
        stream = engine.stream(
            "x", n=4, temperature=1, allowed_token_ids=[*b"ab"], max_tokens=50,
            structured_outputs={"regex": "(a{1,3}|b)c*"},
        )  # fmt: skip
        deltas = [delta async for delta in stream]
        outputs = stream.completion().outputs
        stats = engine.stats()
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert sorted(d.index for d in deltas if d.finish_reason) == [0, 1, 2, 3]
    assert [output.text for output in outputs] == ["aaa", "b", "aaa", "aaa"]
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert (stats.num_finished, stats.num_running) == (1, 0)
