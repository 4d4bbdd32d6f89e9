"""Work of the parsers of a model's output: linear in the output, whatever it is."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from asyncllm.tool_calls import json_call_reader, message_parser, xml_parameters
from asyncllm.tool_calls.chat_syntax import ChatSyntax
from asyncllm.tool_calls.delimiters import (
    MAX_DELIMITER_CHARACTERS,
    DelimiterMatch,
    Delimiters,
    literals_or_pattern,
)
from asyncllm.tool_calls.families import REASONING_FAMILIES, TOOL_CALL_FAMILIES
from asyncllm.tool_calls.message_parser import OutputParser
from asyncllm.tool_calls.xml_parameters import parse_parameters
from tests.backtracking import count_search_steps

TOOLS: dict[str, Any] = {"add": {"properties": {"a": {"type": "integer"}}}}
HARMONY_CONSTRAINT = "\n<|constrain|>json\n<|message|>"
CALLS = {
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": [1, "\\n"]}}\n</tool_call>',
    "mistral_v11": '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": [1, "\\n"]}',
    "mistral": '[TOOL_CALLS][{"name": "add", "id": "x", "arguments": {"a": 1}}, {"name": "add"}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gpt_oss": f"<|start|>assistant<|channel|>commentary to=functions.add{HARMONY_CONSTRAINT}"
    f'{{"a": 1}}<|call|><|start|>assistant to=functions.add<|channel|>analysis{HARMONY_CONSTRAINT}'
    "{}<|end|><|start|>assistant<|channel|>final\n<|constrain|>json<|message|>",
    "llama3_json": '; <|python_tag|> {\n"name": "add", "parameters": {"a": 1}}',
}
THOUGHTS = {"mistral": "[THINK]a[/THINK]", "gpt_oss": "<|channel|>analysis\n<|message|>a<|end|>"}
SYNTAX_PAIRS = [
    (family, "mistral" if "mistral" in family else "gpt_oss" if family == "gpt_oss" else "qwen3")
    for family in TOOL_CALL_FAMILIES
]


CHARACTERS = (" ", "a", "\\")


def hostile_texts(
    family: str, reasoning: str, num_repeats: int, units: tuple[str, ...]
) -> Iterator[str]:
    """Outputs that begin as a call or as reasoning does, and go on with repetitions: of ``units``,
    of the last character, and for the unit "" of the whole beginning."""
    for sample in (CALLS[family], THOUGHTS.get(reasoning, "<think>a</think>")):
        cuts = [part.end() for part in re.finditer(r"\w+|\W+", sample)]
        for cut in cuts:
            begin = sample[:cut]
            for unit in (*units, begin[-1]):
                yield begin + (unit or begin) * num_repeats


class CountingPattern:
    """Pattern that counts the characters it is applied to, up to the end of its match."""

    num_characters = 0

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def search(self, text: str, *args: Any, **kwargs: Any) -> Any:
        return self._count(self._pattern.search(text, *args, **kwargs), text, *args)

    def match(self, text: str, *args: Any, **kwargs: Any) -> Any:
        return self._count(self._pattern.match(text, *args, **kwargs), text, *args)

    @classmethod
    def _count(cls, match: Any, text: str, position: int = 0) -> Any:
        end = len(text) if match is None else match.end()
        CountingPattern.num_characters += end - position
        return match


class CountedText(str):
    """Text that counts the characters that are searched, stripped or appended to."""

    num_characters = 0

    # The parsers call ``find`` with two arguments at most; ``str.find`` also takes an end.
    def find(self, text: str, position: int = 0) -> int:  # type: ignore[override]
        found = str.find(self, text, position)
        CountedText.num_characters += (len(self) if found < 0 else found) - position
        return found

    def __radd__(self, text: str) -> CountedText:
        CountedText.num_characters += len(text) + len(self)
        return CountedText(str.__add__(text, self))


def counting_syntax(family: str, reasoning: str) -> ChatSyntax:
    syntax = ChatSyntax(TOOL_CALL_FAMILIES[family], REASONING_FAMILIES[reasoning])
    for delimiters in (
        syntax.delimiters,
        syntax.calls_close_delimiters,
        syntax.reasoning_close_delimiters,
    ):
        if delimiters is not None:
            delimiters.patterns = [
                (name, CountingPattern(pattern), literal)
                for name, pattern, literal in delimiters.patterns
            ]
    return syntax


def parse(syntax: ChatSyntax, text: str, size: int) -> Any:
    parser = OutputParser(syntax, TOOLS, "")
    for start in range(0, len(text), size):
        parser.push(text[start : start + size])
    parser.finish()
    content, reasoning, _ = parser.take_increments()
    return content, reasoning, [(call.name, call.arguments) for call in parser.calls]


PATTERNS = (
    (json_call_reader, "_JSON_TOKEN_PATTERN"),
    (json_call_reader, "_SPACE_PATTERN"),
    (json_call_reader, "_OUTSIDE_STRING_PATTERN"),
    (json_call_reader, "_INSIDE_STRING_PATTERN"),
    (xml_parameters, "_NAME_END_PATTERN"),
)


@pytest.mark.parametrize(("family", "reasoning"), SYNTAX_PAIRS)
def test_searched_characters_are_linear_in_the_output(
    family: str, reasoning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in PATTERNS:
        monkeypatch.setattr(module, name, CountingPattern(getattr(module, name)))
    syntax = counting_syntax(family, reasoning)
    for text in hostile_texts(family, reasoning, 4096, (*CHARACTERS, "")):
        counts, results = [], []
        for length, piece in ((1024, 16), (4096, 16), (4096, 4096)):
            CountingPattern.num_characters = 0
            results.append(parse(syntax, text[:length], piece))
            counts.append(CountingPattern.num_characters)
        short, long, whole = counts
        assert long < 6 * short, (text[:99], counts)
        assert max(long, whole) < 80 * 4096, (text[:99], counts)
        assert results[1] == results[2], text[:99]


@pytest.mark.parametrize(("family", "reasoning"), SYNTAX_PAIRS)
def test_cuts_beside_long_white_space_change_nothing(family: str, reasoning: str) -> None:
    syntax = ChatSyntax(TOOL_CALL_FAMILIES[family], REASONING_FAMILIES[reasoning])
    sample = CALLS[family]
    for cut in (part.end() for part in re.finditer(r"\w+|\W", sample)):
        for num_spaces in (64, 65, MAX_DELIMITER_CHARACTERS, MAX_DELIMITER_CHARACTERS + 50):
            text = sample[:cut] + " " * num_spaces + sample[cut:]
            assert parse(syntax, text, 8) == parse(syntax, text, 4096), (cut, num_spaces)


@pytest.mark.parametrize(("family", "reasoning"), SYNTAX_PAIRS)
def test_search_steps_are_linear_in_the_text(family: str, reasoning: str) -> None:
    """Count the steps of the patterns' backtracking."""
    tool, thoughts = TOOL_CALL_FAMILIES[family], REASONING_FAMILIES[reasoning]
    delimiters: list[Any] = [tool.ignored_pattern, thoughts.ignored_pattern]
    for field, side in itertools.product(
        (tool.calls_field, thoughts.reasoning_field), ("open", "close")
    ):
        delimiters.append(literals_or_pattern(field, side))
    for pattern in {delimiter for delimiter in delimiters if isinstance(delimiter, str)}:
        texts = [hostile_texts(family, reasoning, n, CHARACTERS) for n in (16, 64)]
        for short, long in zip(*texts, strict=True):
            num_steps = count_search_steps(pattern, long)
            assert num_steps < 6 * count_search_steps(pattern, short), (pattern, long[:99])


def test_adjacent_repeats_of_one_character_class_are_not_linear() -> None:
    short, long = ("a" + " " * n for n in (24, 96))
    for pattern in (r"a\s*b?\s*c", r"\s*b"):
        assert count_search_steps(pattern, long) > 6 * count_search_steps(pattern, short)


def test_white_space_after_a_call_is_read_once() -> None:
    closing = Delimiters([("close", ["</tool_call>"])])
    syntax = json_call_reader.JsonSyntax("object")
    reader = json_call_reader.JsonCallReader(syntax, TOOLS, "<tool_call>", None, closing)
    assert reader.push('{"name": "add", "arguments": {}}') is None
    CountedText.num_characters = 0
    for _ in range(1000):
        assert reader.push(CountedText(" \n")) is None
    assert CountedText.num_characters == 2000
    assert reader.push("x") == "x"
    text = '<tool_call>{"name": "add", "arguments": {}}' + " \n" * 1000
    assert reader.events[-1] == ("text", text)


def test_fragments_of_a_long_delta_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def count(fragment: Any, **changes: Any) -> Any:
        copies.append(len(changes["arguments"]))
        return replace(fragment, **changes)

    monkeypatch.setattr(message_parser, "replace", count)
    parser = OutputParser(ChatSyntax(TOOL_CALL_FAMILIES["hermes"], None), TOOLS, "")
    arguments = json.dumps({"a": "x" * 100_000})
    parser.push(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>')
    assert [fragment.arguments for fragment in parser.take_increments()[2]] == [arguments]
    assert copies == [len(arguments)]


OPENING = "<parameter=a>"


@pytest.mark.parametrize(
    "unit",
    [OPENING, f"{OPENING}\n", "<parameter=", "<parameter=\n", "<parameter=>", "</parameter>",
     f"{OPENING}</parameter>", f"{OPENING}\n\n</parameter>", "\n", "<parameter=a"],
)  # fmt: skip
def test_parameters_are_read_once(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = CountingPattern(xml_parameters._NAME_END_PATTERN)
    monkeypatch.setattr(xml_parameters, "_NAME_END_PATTERN", pattern)
    for begin, end in itertools.product(("", OPENING), ("", "\n", ">", "\n</parameter>")):
        text = CountedText(begin + unit * 1000 + end)
        CountedText.num_characters = CountingPattern.num_characters = 0
        parse_parameters(text)
        num_searched = CountedText.num_characters + CountingPattern.num_characters
        assert num_searched <= 3 * len(text), (begin, end)


def test_the_types_alone_are_kept_of_schemas() -> None:
    syntax = ChatSyntax(TOOL_CALL_FAMILIES["qwen3_coder"], None)
    parameter = {"description": "x" * 10_000, "anyOf": [{"type": "string"}, {"type": "null"}]}
    schemas: dict[str, dict[str, Any]] = {
        "f": {"x": "x" * 10_000, "properties": {"a": parameter, "text": {"type": "string"}}},
        "g": {"properties": {name * 40_000: {"type": ["integer", "integer"]} for name in "abc"}},
        "h": {},
    }
    kept = syntax.schemas_to_parse(schemas)
    assert kept["f"] == {"properties": {"a": {"type": ["null"]}}}
    assert kept["h"] == {"properties": {}}
    assert len(kept["g"]["properties"]) == 3
    schemas["g"]["properties"] = dict.fromkeys(["a" * 1_000_000, "b" * 50_000, "c"], parameter)
    kept = syntax.schemas_to_parse(schemas)
    assert [name[0] for name in kept["g"]["properties"]] == ["a", "c"]


@pytest.mark.parametrize(
    ("value", "arguments"),
    [('["\\ud800"]', '{"a": ["\\ud800"]}'), ("[NaN]", None), ("[1e999]", None), ("[" * 5000, None)],
)
def test_arguments_are_json_in_unicode(value: str, arguments: str | None) -> None:
    syntax = ChatSyntax(TOOL_CALL_FAMILIES["qwen3_coder"], None)
    parser = OutputParser(syntax, {"add": {"properties": {"a": {"type": "array"}}}}, "")
    text = CALLS["qwen3_coder"].replace("1", value)
    parser.push(text)
    parser.finish()
    content = parser.take_increments()[0]
    assert [call.arguments for call in parser.calls] == ([] if arguments is None else [arguments])
    assert content == (text if arguments is None else "")


PIECES = [
    *("<parameter=", OPENING, "<parameter=b>\n", "\n</parameter>", "</parameter>", "\n", "\n\n"),
    *("</parameter", "<parameter=\n", "<parameter=>", "a", ">", "{", "é", "</function>"),
    *(
        "1",
        "-3.0",
        "2.50",
        "1e5",
        "1e999",
        "nan",
        "1_000",
        " 2 ",
        "true",
        " False ",
        "null",
        "None",
    ),
    *('{"a": 1}', "[1]", "9" * 400),
]
TYPES = ["string", "integer", "number", "boolean", "null", "object", "array", "unknown"]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    if rng.random() < 0.1:
        return rng.choice([True, {}, {"type": 5}, {"type": [1, "integer"]}])
    schema: dict[str, Any] = {"type": rng.choices(TYPES, k=rng.randint(0, 3))}
    if rng.random() < 0.5:
        schema["type"] = rng.choice(TYPES)
    for union in ("anyOf", "oneOf") if depth < 2 else ():
        if rng.random() < 0.25:
            schema[union] = [random_schema(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return schema | rng.choice([{}, {}, {"nullable": True}])


def test_parameters_are_those_of_transformers() -> None:
    """With the types alone that are kept of a schema; and by its parser, for other templates."""
    syntax = ChatSyntax(TOOL_CALL_FAMILIES["qwen3_coder"], None)
    rng, num_arguments = random.Random(7), 0
    opening = "<tool_call>\n<function=f>\n"
    for _ in range(300):
        schemas = {"f": {"properties": {key: random_schema(rng) for key in "ab"}}, "g": {}}
        kept = syntax.schemas_to_parse(schemas)
        body = "".join(rng.choices(PIECES, k=rng.randint(0, 8)))
        for _ in range(rng.randint(0, 3)):
            value = "".join(rng.choices(PIECES, k=rng.randint(0, 2)))
            body += f"<parameter={rng.choice('abc')}>\n{value}\n</parameter>\n"
        text = f"{opening}{body}</function>\n</tool_call>"
        expected = syntax._parse_with_transformers(schemas, text)
        assert syntax._parse_with_transformers(kept, text) == expected
        reader = syntax.make_call_reader(kept, DelimiterMatch("tool_calls", opening, {"name": "f"}))
        reader.push(text[len(opening) :])
        reader.finish()
        assert expected is not None
        assert reader.events == [("begin", "f"), ("arguments", expected[0][1]), ("done", "")]
        num_arguments += len(json.loads(expected[0][1]))
    assert num_arguments > 250
