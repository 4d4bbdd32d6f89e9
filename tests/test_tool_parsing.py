"""Tool calls and reasoning in a model's text."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import asyncllm
from asyncllm.config import ReasoningParser, ToolParser
from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.testing import byte_tokenizer
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.tool_calls.chat_syntax import ChatSyntax, ChatSyntaxes
from asyncllm.tool_calls.delimiters import MAX_DELIMITER_CHARACTERS, Delimiters, DelimiterScanner
from asyncllm.tool_calls.families import REASONING_FAMILIES, TOOL_CALL_FAMILIES
from asyncllm.tool_calls.message_parser import OutputParser
from tests.refusals import refused

TOOLS: dict[str, Any] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {},
}
DEMO = Path(asyncllm.__file__).parent / "demo_model"

TEXTS = {
    "hermes": 'Let me see: é🙂.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Par</tool_call>is \\" \\\\ { é"}}\n</tool_call>\n<tool_call>\n'
    '{"arguments": {"a": [1, {"b": "}"}]}, "name": "add"}\n</tool_call>\n',
    "qwen3_coder": "Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão\nPaulo\n"
    "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
    "<function=add>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Oslo; {"}}; '
    '{"type": "function", "name": "add", "parameters": {}}',
    "mistral": 'Sure.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, '
    '"id": "123456789"}, {"name": "add", "arguments": {}}]',
    "mistral_v11": 'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]add'
    "[CALL_ID]abc123def[ARGS]{}",
    "deepseek_v3": "Ok.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    'get_weather\n```json\n{"city": "```"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v31": "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "x"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "gpt_oss": "<|channel|>analysis<|message|>I call to=functions.add<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
    "<|call|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{}",
}
CALLS = {
    "hermes": [
        ("get_weather", {"city": 'Par</tool_call>is " \\ { é'}),
        ("add", {"a": [1, {"b": "}"}]}),
    ],
    "qwen3_coder": [("get_weather", {"city": "São\nPaulo", "days": 3}), ("add", {})],
    "llama3_json": [("get_weather", {"city": "Oslo; {"}), ("add", {})],
    "deepseek_v3": [("get_weather", {"city": "```"}), ("add", {})],
    "deepseek_v31": [("get_weather", {"city": "x"}), ("add", {})],
}
CONTENT = {"hermes": "Let me see: é🙂.", "qwen3_coder": "Hm.", "llama3_json": "", "gpt_oss": ""}

Parsed = tuple[str, str, list[tuple[str, dict[str, Any]]]]


def form_for(
    sources: list[str], tools: str | None, thoughts: str | None, own: Any = None
) -> ChatSyntax:
    form = ChatSyntaxes(sources, own, tools, thoughts).syntax_for(True)
    assert form is not None
    return form


FORMS = {
    family: form_for([], family, "gpt_oss" if family == "gpt_oss" else "qwen3")
    for family in TOOL_CALL_FAMILIES
}


def parse(form: ChatSyntax, pieces: Iterable[str], begin: str = "") -> Parsed:
    """Content, reasoning and calls, put together from deltas alone."""
    parser = OutputParser(form, TOOLS, begin)
    text, reasoning, fragments = "", "", []
    for piece in [*pieces, None]:
        parser.finish() if piece is None else parser.push(piece)
        more_text, more_reasoning, deltas = parser.take_increments()
        text, reasoning = text + more_text, reasoning + more_reasoning
        fragments += deltas
    whole = [delta.index for delta in fragments if delta.done]
    calls = []
    for index in whole:
        own = [delta for delta in fragments if delta.index == index]
        assert own[0].id
        assert own[0].name
        assert all(delta.id is delta.name is None for delta in own[1:])
        assert [delta.done for delta in own] == [False] * (len(own) - 1) + [True]
        calls.append((own[0].id, own[0].name, "".join(delta.arguments for delta in own)))
    assert [(call.id, call.name, call.arguments) for call in parser.calls] == calls
    assert len({call.id for call in parser.calls}) == len(calls)
    assert parser.reasoning == reasoning
    return text, reasoning, [(call.name, call.kwargs) for call in parser.calls]


def begin_of(family: str) -> str:
    return "<|start|>assistant" if family == "gpt_oss" else ""


def test_the_configuration_names_every_family() -> None:
    assert get_args(ToolParser) == ("auto", *TOOL_CALL_FAMILIES)
    assert get_args(ReasoningParser) == ("auto", *REASONING_FAMILIES)


@pytest.mark.parametrize("family", TEXTS)
def test_a_family_is_told_from_text(family: str) -> None:
    text, reasoning, calls = parse(FORMS[family], [TEXTS[family]], begin_of(family))
    assert text == CONTENT.get(family, TEXTS[family].partition(".")[0] + ".")
    assert reasoning == ("I call to=functions.add" if family == "gpt_oss" else "")
    assert calls == CALLS.get(family, [("get_weather", {"city": "Oslo"}), ("add", {})])


@pytest.mark.parametrize("family", TEXTS)
def test_cuts_change_nothing(family: str) -> None:
    """At every character, byte and token boundary; and with parts deleted or exchanged."""
    form, begin, source = FORMS[family], begin_of(family), TEXTS[family]
    whole = parse(form, [source], begin)
    for i in range(len(source)):
        assert parse(form, [source[:i], source[i:]], begin) == whole
    assert parse(form, source, begin) == whole
    for tokenizer in (byte_tokenizer(), Tokenizer.from_directory(DEMO)):
        decoder = tokenizer.text_decoder(skip_special_tokens=False)
        pieces = [decoder.push(token) for token in tokenizer.encode(source)]
        assert parse(form, [*pieces, decoder.flush()], begin) == whole
    rng = random.Random(family)
    for _ in range(100):
        broken = list(source)
        for _ in range(rng.randint(1, 3)):
            i = rng.randrange(len(broken))
            broken[i : i + 1] = rng.choice(["", *'{}[]"\\<> x'])
        text = "".join(broken)
        assert parse(form, text, begin) == parse(form, [text], begin), text


WORDS = st.sampled_from(
    [
        *"<tool_call> </tool_call> <think> </think> { } [ ] , : a é".split(" "),
        *("\n", " ", '"', "\\", '{"name": ', '"add"', ', "arguments": ', '{"a": "x"}'),
        '{"name": "add", "arguments": {}}',
    ]
)


@given(st.lists(WORDS, max_size=24), st.data())
@example(["<tool_call>", '{"name": "add", "arguments": {"a": "x"}}'], None)
def test_any_cut_of_any_text(words: list[str], data: Any) -> None:
    form, text = FORMS["hermes"], "".join(words)
    whole = parse(form, [text])
    assert parse(form, text) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        bounds = [0, *cuts, len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
        assert parse(form, pieces) == whole
    content, reasoning, calls = whole
    if not calls and "<think>" not in text:
        assert (content, reasoning) == (text, "")


def template_of(family: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"tool_calls": TOOL_CALL_FAMILIES[family].calls_field, "content": {}}
    return {"start_anchor_pattern": "(?!)", "fields": fields}


ORACLE_TEXTS = {
    family: text
    for family, text in TEXTS.items()
    if family in ("qwen3_coder", "mistral", "deepseek_v31", "gpt_oss")
} | {
    "hermes": TEXTS["hermes"].replace("</tool_call>is", "is"),
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
    "mistral_v11": '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
    "deepseek_v3": TEXTS["deepseek_v3"].replace('"```"', '"x"'),
}


@pytest.mark.parametrize("family", TEXTS)
def test_calls_are_those_of_transformers(family: str) -> None:
    """Where that reads them: it ends a region at a delimiter in a string, and at no other call."""
    from transformers.utils.chat_parsing import parse_response

    text = ORACLE_TEXTS[family]
    tools = [{"function": {"name": n, "parameters": p}} for n, p in TOOLS.items()]
    message = parse_response(text, template_of(family), prefix="", tools=tools)
    found = message["tool_calls"]
    functions = [call["function"] for call in found]
    expected = [(function["name"].strip(), function["arguments"]) for function in functions]
    assert parse(FORMS[family], [text])[2] == expected
    assert expected


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
def test_calls_as_the_form_writes_them_are_read(family: str) -> None:
    form = TOOL_CALL_FAMILIES[family].call_syntax
    assert form is not None
    arguments = '{"city": "Oslo"}'
    if form.style == "qwen_xml":
        arguments = "<parameter=city>\nOslo\n</parameter>"
    one = form.begin.replace("NAME", "get_weather") + arguments + form.end
    two = form.begin.replace("NAME", "add")
    two += ("" if form.style == "qwen_xml" else "{}") + form.end
    calls = [("get_weather", {"city": "Oslo"}), ("add", {})]
    for both in {False, form.parallel}:
        text = form.prefix + one + (form.separator + two) * both + form.suffix
        parsed = parse(FORMS[family], [text], begin_of(family))
        assert parsed == ("", "", calls[: 1 + both])


MALFORMED = {
    "not JSON": "<tool_call>\nadd(1, 2)\n</tool_call>",
    "a tool that is not on offer": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    "no name": '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    "two names": '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>',
    "another key": '<tool_call>{"name": "add", "args": {}}</tool_call>',
    "arguments that are a list": '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    "arguments that are no JSON": '<tool_call>{"name": "add", "arguments": {a: 1}}</tool_call>',
    "NaN": '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    "a brace too many": '<tool_call>{"name": "add", "arguments": {}}}</tool_call>',
    "a brace too few": '<tool_call>{"name": "add", "arguments": {}</tool_call>',
    "deep": '<tool_call>{"name": "add", "arguments": {"a":' + "[" * 9999 + "]" * 9999 + "}}",
    "cut in the name": '<tool_call>{"name": "ad',
    "cut in the arguments": '<tool_call>\n{"name": "add", "arguments": {"a": "12',
    "a long name": '<tool_call>{"name": "' + "a" * 5000 + '"}</tool_call>',
    "a bad escape": '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_comes_out_as_text(text: str) -> None:
    form = FORMS["hermes"]
    assert parse(form, [text]) == (text, "", [])
    assert parse(form, text) == (text, "", [])
    if text.endswith("</tool_call>"):
        more = f'{text}<tool_call>{{"name": "add", "arguments": {{}}}}</tool_call>'
        assert parse(form, [more]) == parse(form, more) == (text, "", [("add", {})])


def test_calls_before_a_malformed_one_stand() -> None:
    text = '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "rm", "arguments": {}}]'
    expected = (', {"name": "rm", "arguments": {}}]', "", [("add", {})])
    assert parse(FORMS["mistral"], [text]) == parse(FORMS["mistral"], text) == expected
    assert parse(FORMS["mistral"], ["[TOOL_CALLS][]"])[0] == "[TOOL_CALLS][]"


def test_missing_closing_delimiter_at_end_of_output() -> None:
    for end in ("", "\n", "\n</tool"):
        text = '<tool_call>{"name": "add", "arguments": {"a": 1}}' + end
        assert parse(FORMS["hermes"], text) == ("", "", [("add", {"a": 1})])


@pytest.mark.parametrize(
    "text", ['{"city": "Paris"}', "{ x: 1 }", "a {", '{"name": "Ida", "age": 3}', "{}", "; {"]
)
def test_other_json_is_text(text: str) -> None:
    assert parse(FORMS["llama3_json"], text) == (text, "", [])


def test_white_space_beside_delimiters_is_the_formats() -> None:
    form = FORMS["hermes"]
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert parse(form, f"\n{call}\n{call}\n")[0] == ""
    assert parse(form, f"One. \n{call}\nTwo. ")[0] == "One. \n\nTwo. "
    assert parse(form, "<think>\n a b \n</think>\n\nc\n")[:2] == ("c\n", "a b")
    assert parse(form, " \n a \n ")[0] == " \n a \n "


def test_arguments_of_a_megabyte() -> None:
    arguments = json.dumps({"a": 'x{\\"' * 250_000})
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    pieces = [text[i : i + 61] for i in range(0, len(text), 61)]
    assert parse(FORMS["hermes"], pieces) == ("", "", [("add", json.loads(arguments))])


def test_thoughts_contain_no_calls() -> None:
    form = FORMS["hermes"]
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse(form, f"<think>{call}</think>{call}") == ("", call, [("add", {})])
    # The prompt opened it; and it never ends.
    assert parse(form, f"so {call}", "<think>") == ("", f"so {call}", [])
    assert parse(form, "so </think>\n\nYes.", "<think>") == ("Yes.", "so", [])


def test_answer_beginning_in_prompt() -> None:
    think, harmony = FORMS["hermes"], FORMS["gpt_oss"]
    assert think.answer_prefix_in_prompt("<|im_start|>assistant\n<think>\n") == "<think>"
    assert think.answer_prefix_in_prompt("<think>\n\n</think>\n\n") == ""
    assert harmony.answer_prefix_in_prompt("<|end|><|start|>assistant") == "<|start|>assistant"
    text = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
    assert parse(harmony, text, "<|start|>assistant") == ("", "", [("add", {"a": 1})])
    assert parse(harmony, "Hello", "<|start|>assistant") == ("Hello", "", [])
    final = "<|channel|>final<|message|>Hello"
    assert parse(harmony, final, "<|start|>assistant") == ("Hello", "", [])


@pytest.mark.parametrize(
    ("family", "source"),
    [
        ("hermes", "{{ '<tool_call>' }}"),
        ("qwen3_coder", "<tool_call> <function= <parameter="),
        ("mistral", "[TOOL_CALLS]["),
        ("mistral_v11", "[TOOL_CALLS] [ARGS]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> ```json"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
        ("gpt_oss", "<|channel|> <|constrain|> <|message|>"),
        ("llama3_json", "<|python_tag|>"),
    ],
)
def test_a_chat_template_shows_its_family(family: str, source: str) -> None:
    form = form_for([source], "auto", "auto")
    assert form.calls_field is TOOL_CALL_FAMILIES[family].calls_field
    assert not form.reasoning_field


def test_a_family_is_named_or_unknown() -> None:
    formats = ChatSyntaxes(["{{ messages }}"], None, "auto", "auto")
    assert formats.syntax_for(False) is None
    with refused("tools", "tool_call_parser"):
        formats.syntax_for(True)
    # GLM's, and another that is written as elements: calls there are no JSON.
    for source in ("<tool_call>{{ name }}<arg_key>a</arg_key><arg_value>1</arg_value>",
                   '<tool_call><function name="f"></function></tool_call>'):  # fmt: skip
        with pytest.raises(InvalidRequestError, match="tool_call_parser"):
            form_for([source], "auto", "auto")
        assert (
            form_for([source], "hermes", "auto").calls_field
            is TOOL_CALL_FAMILIES["hermes"].calls_field
        )
    thinking = ChatSyntaxes(["<think>"], None, "auto", "auto").syntax_for(False)
    assert thinking is not None
    assert thinking.reasoning_field is REASONING_FAMILIES["qwen3"].reasoning_field
    assert ChatSyntaxes(["<think>"], None, "auto", None).syntax_for(False) is None


OWN = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}


def test_the_tokenizers_own_template_comes_first() -> None:
    """Gemma's, as transformers serves it: JSON that is none, parsed a region at a time."""
    form = form_for(["<tool_call> <think>"], "auto", "auto", OWN)
    text = (
        "<|channel>thought\nHm.<channel|>Ok.<|tool_call>call:get_weather{city:"
        '<|"|>Os"lo<|"|>}<tool_call|><|tool_call>call:rm{}<tool_call|><turn|>'
    )
    calls = [("get_weather", {"city": 'Os"lo'})]
    expected = ("Ok.<|tool_call>call:rm{}<tool_call|>", "Hm.", calls)
    assert parse(form, [text]) == parse(form, text) == expected
    assert (form.reasoning_begin, form.reasoning_end) == ("<|channel>thought\n", "<channel|>")
    assert (
        form_for([], "hermes", "auto", OWN).calls_field is TOOL_CALL_FAMILIES["hermes"].calls_field
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version"),
        ({"fields": {"tool_calls": {"open_pattern": "("}}}, "regex"),
        ({"fields": {"tool_calls": {"open_pattern": "(?<=a)b"}}}, "looks back"),
    ],
)
def test_unusable_template_is_refused_at_start(change: Any, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        ChatSyntaxes([], {**OWN, **change}, "auto", "auto")


def test_a_delimiter_has_a_greatest_length() -> None:
    scanner = DelimiterScanner(Delimiters([("x", r"<a+>")]))
    longest = "<" + "a" * (MAX_DELIMITER_CHARACTERS - 2) + ">"
    assert scanner.feed(f"b{longest}c")[1] is not None
    assert DelimiterScanner(Delimiters([("x", r"<a+>")])).feed("b<a" + longest[1:] + "c") == (
        "b<a" + longest[1:] + "c",
        None,
        "",
    )
    scanner = DelimiterScanner(Delimiters([("x", r"<a+>")]))
    out = "".join(scanner.feed("<" + "a" * 999)[0] for _ in range(6))
    assert len(out) >= 1000


def test_text_without_delimiter_start_is_not_searched() -> None:
    class Never:
        def search(self, *_: Any, **__: Any) -> None:
            raise AssertionError("searched")

    mine = Delimiters([("x", ["<tool_call>"])])
    mine.patterns = [("x", Never(), True)]
    assert DelimiterScanner(mine).feed(" word é\n") == (" word é\n", None, "")
    assert FORMS["llama3_json"].delimiters.may_begin_in("{")
