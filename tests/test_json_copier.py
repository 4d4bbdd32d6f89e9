"""JsonCopier: what it copies and counts, and that it reads no more than its limits."""

from __future__ import annotations

import itertools
import json
import sys
import tracemalloc
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncllm import InvalidRequestError, SamplingParams
from asyncllm import validation as check
from asyncllm.json_copier import JsonCopier, NotJsonError
from asyncllm.structured.response_format import parse_response_format
from asyncllm.testing import fake_engine
from asyncllm.text import template_input
from asyncllm.text.template_input import TemplateInput
from asyncllm.tool_calls.tool_use import ToolUse

MESSAGE = {"role": "user", "content": "x"}
LONG = "x" * 1_000_000


def copier(max_values: int = 1000, max_characters: int = 10**6, max_depth: int = 50) -> JsonCopier:
    return JsonCopier(max_values, max_characters, max_depth)


def values_in(value: Any) -> Iterator[tuple[Any, int]]:
    """All values with their depths, each as often as it occurs."""
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        yield item, depth
        if isinstance(item, dict):
            pending += [(key, depth) for key in item]
            pending += [(one, depth + 1) for one in item.values()]
        elif isinstance(item, (list, tuple)):
            pending += [(one, depth + 1) for one in item]


scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(0, 1) | st.text(max_size=3)
nested_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=4)
        | inner.map(lambda one: [one] * 3)
        | inner.map(lambda one: {"a": one, "b": [one, one]})
        | st.lists(st.dictionaries(st.text(max_size=2), scalars, max_size=3), max_size=4)
    ),
    max_leaves=5,
)


SHARED = {"a": [], "b": [[], []]}


@example({"a": SHARED, "b": [SHARED, SHARED]}, 25, 4)
@given(nested_values, st.integers(0, 400), st.integers(0, 6))
def test_copies_and_counts_as_a_plain_walk(value: Any, max_values: int, max_depth: int) -> None:
    found = list(values_in(value))
    texts = [one for one, _ in found if type(one) is str]
    fits = len(found) <= max_values and max(depth for _, depth in found) <= max_depth
    one = copier(max_values, max_depth=max_depth)
    try:
        copied = one.copy(value)
    except NotJsonError:
        assert not fits
    else:
        assert fits
        assert repr(copied) == repr(value)
        assert one.num_values == len(found)
        assert sorted(one.texts) == sorted(texts)
        bits = sum(one.bit_length() // 4 for one, _ in found if type(one) is int)
        assert sum(map(len, texts)) <= one.num_characters <= sum(map(len, texts)) + bits + 99


@given(nested_values)
def test_copies_are_independent(value: Any) -> None:
    before = deepcopy(value)
    copied = copier(10**6).copy(value)
    for item, _ in list(values_in(value)):
        if isinstance(item, (dict, list)):
            item.clear()
    assert repr(copied) == repr(before)


def num_python_calls(call: Callable[[], Any]) -> int:
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    return events.count("call")


def nested_dicts(times: int, depth: int) -> list[Any]:
    return [halves(depth - 1, lambda inner: {"a": inner}) for _ in range(times)]


def test_parsed_values_are_counted_without_a_copy() -> None:
    value = {"a": [1, {"b": "c"}], "d": {}}
    counted, copying = copier(), copier()
    found, copied = counted.copy(value, is_parsed=True), copying.copy(value)
    assert found is value
    assert found["a"] is value["a"]
    assert copied["a"] is not value["a"]
    assert counted.num_values == copying.num_values == 9
    assert counted.num_containers == copying.num_containers
    assert sorted(counted.texts) == sorted(copying.texts)
    with pytest.raises(NotJsonError, match="beyond 8 values"):
        copier(8).copy(value, is_parsed=True)
    with pytest.raises(NotJsonError, match="nested more than 2 levels"):
        copier(max_depth=2).copy(value, is_parsed=True)
    assert copier(max_depth=3).copy(value, is_parsed=True) is value


def test_containers_of_one_depth_are_copied_together() -> None:
    for value in (nested_dicts(500, 9), [[]] * 5000, [{"a": [{"b": [1, []]}]}] * 1000):
        assert num_python_calls(lambda value=value: copier(10**5).copy(value)) < 500
    schema = {"type": "object", "x": nested_dicts(500, 9)}
    assert num_python_calls(lambda: tools(schema)) < 500
    assert num_python_calls(lambda: TemplateInput([MESSAGE] * 1000, {})) < 500


def test_plain_numbers_are_checked_by_three_calls_each() -> None:
    values = [0, -(2**63), 2**64 - 1, 1.5, -0.0, 1e308] * 100
    copied = check.plain_data("x", {"a": values})
    assert repr(copied) == repr({"a": [0, -(2**63), 2**64 - 1, 1.5, 0.0, 1e308] * 100})
    assert num_python_calls(lambda: check.plain_data("x", {"a": values})) < 3.5 * len(values)
    for number in (2**64, -(2**63) - 1, float("inf"), float("nan"), 10**5000):
        refused(lambda number=number: check.plain_data("x", {"a": [number]}), "x")


def test_plain_data_is_bounded() -> None:
    assert len(check.plain_data("x", {"a": [0] * 8189})["a"]) == 8189
    assert check.plain_data("x", {"a": "b" * 65_535}) == {"a": "b" * 65_535}
    for value in ([0] * 8190, "b" * 65_536):
        with pytest.raises(InvalidRequestError, match="8192 values and 65536 characters at most"):
            check.plain_data("x", {"a": value})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": object()}]}, "x.a[1].b: a object"),
        ([[], ({}, (b"",))], "x[1][1][0]: a bytes"),
        ([{"a": {(1, object): 2}}], "x[0].a[0][1]: a type"),
        ([UserDict({"a": [OrderedDict(b=b"")]})], "x[0].a[0].b: a bytes"),
        (object(), "x: a object"),
    ],
)
def test_an_error_names_the_faulty_value(value: Any, message: str) -> None:
    with pytest.raises(NotJsonError) as caught:
        copier().copy(value)
    assert caught.value.message_for("x") == message


class Counted(UserDict[str, Any]):
    reads = 0

    def items(self) -> Any:
        type(self).reads += 1
        return super().items()


def halves(depth: int, kind: Callable[[Any], Any]) -> Any:
    value: Any = kind(0)
    for _ in range(depth):
        value = kind(value)
    return value


def counted(value: Any) -> Counted:
    return Counted({"a": value, "b": value})


def refused(call: Callable[[], Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert caught.value.param == param


def chat(**message: Any) -> TemplateInput:
    return TemplateInput([MESSAGE | message], {})


def tools(parameters: Any, times: int = 1) -> ToolUse | None:
    named = [{"name": f"f{i}", "parameters": parameters} for i in range(times)]
    return ToolUse.parse([{"type": "function", "function": one} for one in named], "auto", True)


CALLS: dict[str, Callable[[Any], Any]] = {
    "structured_outputs": lambda value: SamplingParams(structured_outputs={"json": value}),
    "response_format": lambda value: parse_response_format(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    ),
    "extra_args": lambda value: SamplingParams(extra_args={"x": value}),
    "tools": tools,
    "messages": lambda value: chat(content=value),
    "chat_template_kwargs": lambda value: TemplateInput([MESSAGE], {"x": value}),
}


@pytest.mark.parametrize("param", CALLS)
def test_shared_containers_are_read_once(param: str) -> None:
    Counted.reads = 0
    refused(lambda: CALLS[param](halves(30, counted)), param)
    assert Counted.reads <= 60


@pytest.mark.parametrize("param", CALLS)
def test_long_texts_are_refused_before_memory_is_taken(param: str) -> None:
    value = {"type": "object", "properties": {"x": {"enum": [LONG] * 150}}}
    tracemalloc.start()
    try:
        refused(lambda: CALLS[param](value), param)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_long_integers_are_not_written() -> None:
    with pytest.raises(InvalidRequestError, match="beyond 131072 characters"):
        SamplingParams(structured_outputs={"json": {"enum": [10**4000] * 1000}})
    params = SamplingParams(structured_outputs={"json": {"enum": [10**1000] * 100}})
    assert json.loads(params.structured_outputs.text) == {"enum": [10**1000] * 100}


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1] * 24_573},
        {"enum": [[1]] * 12_286},
        {"properties": {f"p{i}": {"type": "string"} for i in range(4_500)}},
        {"a" * 131_060: 1},
        {"enum": ["x" * 10] * 9_300},
    ],
)
def test_schemas_up_to_the_bound_are_accepted(schema: Any) -> None:
    for value in (schema, json.dumps(schema)):
        text = SamplingParams(structured_outputs={"json": value}).structured_outputs.text
        assert text == json.dumps(schema)


def test_schemas_of_more_values_are_refused() -> None:
    for schema in ({"enum": [1] * 24_574}, {"enum": [[1]] * 12_287}):
        for value in (schema, json.dumps(schema)):
            with pytest.raises(InvalidRequestError, match=r"json: beyond 24576 values"):
                SamplingParams(structured_outputs={"json": value})


def test_tools_are_counted_together() -> None:
    one = {"type": "object", "properties": {str(i): {"type": "string"} for i in range(1000)}}
    assert tools(one, 10) is not None
    with pytest.raises(InvalidRequestError, match=r"^tools: beyond 65536 values"):
        tools(one, 100)


def test_arguments_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def conversation(arguments: str, times: int = 1) -> list[Any]:
        return [MESSAGE | {"tool_calls": [{"function": {"arguments": arguments}}] * times}]

    prose = json.dumps({"a": ',"[{\\' * 50_000})
    found = TemplateInput(conversation(prose), {}).values["messages"][0]
    assert found["tool_calls"][0]["function"]["arguments"] == json.loads(prose)
    many = '{"a": [' + "1," * 16_000 + "1]}"
    TemplateInput(conversation(many), {})
    monkeypatch.setattr(template_input.json, "loads", lambda text: pytest.fail("it is parsed"))
    for arguments, times in ((many, 2), ('{"a": [' + "1," * 16_400 + "1]}", 1)):
        with pytest.raises(InvalidRequestError, match="beyond 16384 values"):
            TemplateInput(conversation(arguments, times), {})


@pytest.mark.parametrize("param", ["tools", "messages", "chat_template_kwargs"])
def test_containers_are_bounded(param: str) -> None:
    def call(num_lists: int) -> Any:
        lists: list[Any] = [[] for _ in range(num_lists)]
        if param == "messages":
            return chat(content="x", more=lists)
        return CALLS[param]({"x": lists})

    call(16_370)
    with pytest.raises(InvalidRequestError, match="beyond 16384 dicts and lists") as caught:
        call(16_400)
    assert caught.value.param == param


def test_long_conversations_and_many_tools_are_accepted() -> None:
    assert len(TemplateInput([MESSAGE.copy() for _ in range(13_000)], {}).values["messages"]) > 9999
    properties = {f"p{i}": {"type": "string", "description": "a"} for i in range(64)}
    assert tools({"type": "object", "properties": properties}, 64) is not None


def test_an_agents_long_conversation_is_accepted() -> None:
    properties = {f"p{i}": {"type": "string", "description": "a text"} for i in range(10)}
    use = tools({"type": "object", "properties": properties}, 256)
    assert use is not None
    call = {"id": "1", "type": "function"}
    call["function"] = {"name": "f1", "arguments": '{"p1": "a", "p2": [1, 2], "p3": 3}'}
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    found = TemplateInput(turn * 1000, {"tools": list(use.schemas)}, tools_copier=use.copier)
    assert len(found.values["messages"]) == 2000


def test_a_conversation_has_the_copies_of_its_tools() -> None:
    use = tools({"type": "object", "properties": {"a": {"enum": ["b", 2**40]}}})
    assert use is not None
    schemas = list(use.schemas)
    found = TemplateInput([MESSAGE], {"tools": schemas}, tools_copier=use.copier)
    assert found.values["tools"] is schemas
    alone = TemplateInput([MESSAGE], {"tools": schemas})
    assert found.values == alone.values
    assert set(found.texts) == set(alone.texts)


async def test_one_limit_holds_for_tools_and_messages() -> None:
    parameters = {"type": "object", "x": [0] * 40_000}
    offered: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    messages: Any = [MESSAGE | {"y": [0] * 40_000}]
    async with fake_engine("x") as engine:
        refused(lambda: engine.chat(messages, tools=offered), "messages")
        with pytest.raises(InvalidRequestError, match="beyond 65536 values") as caught:
            await engine.tokenize(messages, tools=offered)
    assert caught.value.param == "messages"


def test_different_references_of_tools_are_bounded() -> None:
    def call(num_references: int, times: int, depth: int = 1) -> Any:
        deep = halves(depth, lambda inner: {"a": inner})
        leaves = {str(i): {} for i in range(num_references)}
        pointer = "#/d" + "/a" * depth
        value: Any = deep
        for _ in range(depth - 1):
            value = value["a"]
        value["a"] = leaves
        references = [{"$ref": f"{pointer}/{i}"} for i in leaves]
        return tools({"type": "object", "d": deep, "x": references * times})

    assert call(1000, 10) is not None
    for arguments in ((4000, 1), (100, 1, 60)):
        with pytest.raises(InvalidRequestError, match="more than 4096 parts") as caught:
            call(*arguments)
        assert caught.value.param == "tools"


def with_calls(*arguments: Any, as_text: bool = False) -> list[Any]:
    """Arguments of a message's tool calls as a template gets them."""
    calls = [{"function": {"name": "f", "arguments": one}} for one in arguments]
    found = TemplateInput([MESSAGE | {"tool_calls": calls}], {}, arguments_as_text=as_text)
    return [one["function"]["arguments"] for one in found.values["messages"][0]["tool_calls"]]


def test_long_arguments_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    long = json.dumps({"a": ["\n,", 10**4000, float("inf")] * 60})
    assert with_calls(long, "{a", long) == [json.loads(long), "{a", json.loads(long)]
    assert with_calls(long * 2, as_text=True) == [long * 2]
    monkeypatch.setattr(template_input.json, "loads", lambda text: pytest.fail("it is parsed"))
    assert with_calls("x" * 2**22) == ["x" * 2**22]
    for texts in ([long] * 5, [" " * 2**20 + "{}"], ["{}"] * 4096):
        with pytest.raises(InvalidRequestError, match="beyond 1048576 characters") as caught:
            with_calls(*texts)
        assert caught.value.param == "messages"


def test_long_arguments_are_refused_before_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"a": ["\n,", 10**4000, 1.5] * 50}
    assert with_calls(values, values, as_text=True) == [json.dumps(values)] * 2
    monkeypatch.setattr(template_input.json, "dumps", lambda *a, **kw: pytest.fail("it is written"))
    for many in (["x" * 600_000] * 2, [10**4000] * 400, [1.5] * 20_000):
        with pytest.raises(InvalidRequestError, match="arguments of all tool calls: beyond"):
            with_calls({"a": many}, as_text=True)


def test_a_message_may_occur_several_times() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": ["b", {"c": "d"}]}'}}
    for message in (MESSAGE, MESSAGE | {"tool_calls": [call, call]}, MESSAGE | {"name": None}):
        same = TemplateInput([message] * 3, {})
        apart = TemplateInput([deepcopy(message) for _ in range(3)], {})
        assert same.values == apart.values
        assert same.num_characters == apart.num_characters
        assert "".join(same.texts) == "".join(apart.texts)


class Compared(int):
    comparisons = 0

    def __lt__(self, other: Any) -> bool:
        Compared.comparisons += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


class Shown:
    times = 0

    def __repr__(self) -> str:
        Shown.times += 1
        return "."


def test_descriptions_read_little_of_a_value() -> None:
    value: Any = [Shown()] * 10
    for _ in range(20):
        value = [value] * 10
    bunch: Any = [[[Shown()] * 10] * 10] * 10
    for one in (value, bunch, OrderedDict.fromkeys(range(10**5), Shown())):
        assert len(check.describe(one)) < 10_000
    assert Shown.times <= 600
    check.describe(set(map(Compared, range(10**4))))
    check.describe(frozenset(map(Compared, range(10**4))))
    assert Compared.comparisons < 200
    tracemalloc.start()
    try:
        for one in (b"x" * 10**6, bytearray(10**6), type("Text", (str,), {})("x" * 10**6)):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            assert len(check.describe(one)) < 500
            assert tracemalloc.get_traced_memory()[1] - before < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_long_strings_are_not_encoded(name: str) -> None:
    tracemalloc.start()
    try:
        refused(lambda: SamplingParams(**{name: [LONG]}), name)
        refused(lambda: SamplingParams(structured_outputs={"regex": LONG}), "structured_outputs")
        refused(lambda: SamplingParams(structured_outputs={"choice": [LONG]}), "structured_outputs")
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


class EndlessList(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self[0])


class EndlessDict(dict[str, Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat("a")

    keys = __iter__  # pyright: ignore[reportAssignmentType]


async def test_iterators_without_end_are_not_followed():
    refused(lambda: TemplateInput(EndlessList([MESSAGE]), {}), "messages")
    async with fake_engine("x") as engine:
        kwargs = EndlessDict({"a": 1})
        assert (await engine.chat([MESSAGE], chat_template_kwargs=kwargs).result()).text == "x"
