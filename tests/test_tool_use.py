"""Tools of chat(): accepted forms, and schemas of functions."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pydantic
import pytest

from asyncllm.errors import InvalidRequestError
from asyncllm.structured.references import resolve_pointer
from asyncllm.tool_calls.chat_syntax import ChatSyntax, ChatSyntaxes
from asyncllm.tool_calls.families import TOOL_CALL_FAMILIES
from asyncllm.tool_calls.function_schema import function_schema
from asyncllm.tool_calls.tool_grammar import tool_grammar, with_tool_grammar
from asyncllm.tool_calls.tool_use import ToolUse
from tests.refusals import refused

ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
}


def use(tools: Any, choice: Any = "auto", parallel: Any = True) -> ToolUse:
    found = ToolUse.parse(tools, choice, parallel)
    assert found is not None
    return found


def form_of(family: str) -> ChatSyntax:
    form = ChatSyntaxes([], None, family, None).syntax_for(True)
    assert form is not None
    return form


def test_each_form_of_a_tool_is_the_same_tool() -> None:
    expected = {"type": "function", "function": ADD}
    for tool in (expected, {"type": "function", **ADD}, ADD):
        found = use([tool])
        assert list(found.schemas) == [expected]
        assert found.schemas[0]["function"] is not ADD
        assert found.parameter_schemas == {"add": {"type": "object"}}


def test_no_tools_and_none_chosen_offer_none() -> None:
    for tools, choice in (
        (None, "auto"),
        ([], "auto"),
        ((), "auto"),
        (None, None),
        ([ADD], "none"),
    ):
        assert ToolUse.parse(tools, choice, True) is None
    chosen = use([ADD], {"type": "function", "function": {"name": "add"}}, False)
    assert (chosen.choice, chosen.parallel) == ({"name": "add"}, False)
    assert use([ADD], {"type": "function", "name": "add"}).choice == {"name": "add"}


CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


def loop() -> dict[str, Any]:
    itself: dict[str, Any] = {"type": "object", "properties": {}}
    itself["properties"]["x"] = itself
    return itself


@pytest.mark.parametrize(
    ("tools", "choice", "param", "says"),
    [
        (3, "auto", "tools", "tools=3"),
        ("add", "auto", "tools", "expected OpenAI's dicts"),
        ([3], "auto", "tools", r"tools\[0\]: has 3"),
        ([{}], "auto", "tools", r"tools\[0\].function.name: has None"),
        ([{"type": "web_search"}], "auto", "tools", r"tools\[0\]"),
        ([{"type": "function", "function": 3}], "auto", "tools", "expected a dict with a name"),
        ([{"name": "a b"}], "auto", "tools", "has 'a b', expected 1 to 64 letters"),
        ([{"name": "a" * 65}], "auto", "tools", "name"),
        ([{"name": "a", "description": 3}], "auto", "tools", "description: has 3"),
        ([{"name": "a", "parameters": 3}], "auto", "tools", "parameters: has 3"),
        ([{"name": "a", "parameters": {"type": "array"}}], "auto", "tools", "parameters.type"),
        ([{"name": "a", "parameters": {"properties": [1]}}], "auto", "tools", "properties"),
        ([{"name": "a", "parameters": {"properties": {"x": 3}}}], "auto", "tools", "properties"),
        ([{"name": "a", "parameters": {"required": "x"}}], "auto", "tools", "required"),
        ([{"name": "a", "parameters": CIRCLE}], "auto", "tools", "a circle of \\$ref"),
        ([{"name": "a", "parameters": {"$ref": "#"}}], "auto", "tools", "a circle of \\$ref"),
        ([{"name": "a", "parameters": {"$ref": "#/x"}}], "auto", "tools", "leads nowhere"),
        ([{"name": "a", "parameters": {"$ref": "http://x"}}], "auto", "tools", "into this schema"),
        ([{"name": "a", "parameters": loop()}], "auto", "tools", "nested more than"),
        ([{"name": "a", "parameters": {"x": {1, 2}}}], "auto", "tools", "a set"),
        ([ADD, ADD], "auto", "tools", r"tools\[1\]: has the name 'add' a second time"),
        ([ADD] * 513, "auto", "tools", "at most 512"),
        ([ADD], "sometimes", "tool_choice", '"auto", "none", "required" or'),
        ([ADD], {"type": "function"}, "tool_choice", "expected"),
        ([ADD], {"type": "function", "name": "rm"}, "tool_choice", "on offer: add"),
        ([], {"type": "function", "name": "rm"}, "tool_choice", "there are none"),
        (None, "required", "tool_choice", "without tools"),
        ([ADD], "required" * 1000, "tool_choice", "expected"),
    ],
)
def test_errors_name_the_argument(tools: Any, choice: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        use(tools, choice)
    assert caught.value.param == param
    assert len(str(caught.value)) < 2000


def test_a_schema_that_holds_itself_is_a_tree() -> None:
    assert use([{"name": "a", "parameters": TREE}]).parameter_schemas["a"] == TREE


def test_each_reference_of_a_chain_is_resolved_once(monkeypatch) -> None:
    resolved: list[str] = []

    def resolve(pointer: str, root: Any) -> Any:
        resolved.append(pointer)
        return resolve_pointer(pointer, root)

    monkeypatch.setattr("asyncllm.tool_calls.tool_use.resolve_pointer", resolve)
    links = [(f"d{i}", {"$ref": f"#/d{i + 1}"}) for i in range(2000)]
    for chain in (dict(links), dict(reversed(links))):
        resolved.clear()
        assert use([{"name": "a", "parameters": chain | {"d2000": {}}}])
        assert sorted(resolved) == sorted(f"#/d{i + 1}" for i in range(2000))
        with refused("tools", "a circle of"):
            use([{"name": "a", "parameters": chain | {"d2000": {"$ref": "#/d1000"}}}])


def test_parallel_tool_calls_is_true_or_false() -> None:
    with refused("parallel_tool_calls"):
        use([ADD], "auto", 3)


def get_weather(city: str, days: int = 3, unit: Literal["c", "f"] = "c") -> str:
    """Get the weather in a city.

    From a station.

    Args:
        city: The city,
            with its country.
        days (int): How many.
        unit: of the temperature.

    Returns:
        A line.
    """
    return city


def test_functions_are_those_of_transformers() -> None:
    """But for the defaults, and what it says of types where JSON schema needs no word."""
    from transformers.utils import get_json_schema

    def everything(
        a: int, b: float, c: bool, d: list[str], e: dict[str, int], f: list[list[int]]
    ) -> None:
        """
        Takes it.

        Args:
            a: one
            b: two
            c: three
            d: four
            e: five
            f: six
        """

    mine, theirs = function_schema(everything), get_json_schema(everything)
    del theirs["function"]["return"]
    assert mine == theirs
    described = function_schema(get_weather)["function"]
    assert described["description"] == "Get the weather in a city.\n\nFrom a station."
    assert described["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city, with its country."},
            "days": {"type": "integer", "description": "How many.", "default": 3},
            "unit": {
                "type": "string",
                "enum": ["c", "f"],
                "description": "of the temperature.",
                "default": "c",
            },
        },
        "required": ["city"],
    }


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(TypedDict):
    x: int
    y: NotRequired[int]


@dataclasses.dataclass
class Box:
    corner: Point
    label: str = ""


class Person(pydantic.BaseModel):
    """A human."""

    name: str
    friends: list[Person] = []


SCHEMAS = {
    "str": (str, {"type": "string"}),
    "None": (None, {"type": "null"}),
    "Any": (Any, {}),
    "optional": (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    "annotated": (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
    "enum": (Colour, {"type": "string", "enum": ["red", "blue"]}),
    "mixed literal": (Literal["a", 1], {"enum": ["a", 1]}),
    "set": (set[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    "tuple": (
        tuple[int, str],
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "items": False,
        },
    ),
    "tuple of any length": (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
    "plain dict": (dict, {"type": "object"}),
    "dataclass": (
        Box,
        {
            "type": "object",
            "properties": {
                "corner": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                    "required": ["x"],
                },
                "label": {"type": "string"},
            },
            "required": ["corner"],
        },
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_types(name: str) -> None:
    kind, expected = SCHEMAS[name]

    def tool(x):
        pass

    tool.__annotations__ = {"x": kind}
    assert function_schema(tool)["function"]["parameters"]["properties"]["x"] == expected


def test_a_pydantic_model_is_a_tool_or_a_parameter() -> None:
    function = use([Person]).schemas[0]["function"]
    assert (function["name"], function["description"]) == ("Person", "A human.")

    def greet(person: Person) -> None:
        """Greets.

        :param person: whom
        """

    parameters = use([greet]).parameter_schemas["greet"]
    assert parameters["properties"]["person"]["$ref"] == "#/$defs/Person"
    assert parameters["properties"]["person"]["description"] == "whom"
    assert parameters["$defs"]["Person"]["properties"]["name"]["type"] == "string"


class Wrong:
    def __init__(self) -> None:
        pass

    def method(self, x: int) -> int:
        """A method."""
        return x


def positional(x: int, /) -> None: ...
def collecting(*xs: int) -> None: ...
def untyped(x) -> None: ...
def of_object(x: Wrong) -> None: ...
# There is no such name: what a forward reference that nothing defines looks like.
def unresolved(x: Missing) -> None: ...  # pyright: ignore[reportUndefinedVariable] # noqa: F821


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (positional, r"positional\(x\) is passed by position"),
        (collecting, r"collecting\(xs\) is passed by position or collects"),
        (untyped, r"untyped\(x\) has no type hint"),
        (of_object, "Wrong.*no JSON schema"),
        (unresolved, "types of 'unresolved' cannot be read.*Missing"),
        (lambda: 1, "name"),
    ],
)
def test_a_function_that_has_no_schema_is_refused(tool: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        use([ADD, tool])
    assert caught.value.param == "tools"
    assert str(caught.value).startswith("tools[1]")


def test_methods_have_no_self() -> None:
    found = function_schema(Wrong().method)["function"]
    assert found["parameters"]["properties"] == {"x": {"type": "integer"}}
    assert found["parameters"]["required"] == ["x"]


WEATHER = {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}
TWO = [{"type": "function", "function": one} for one in (ADD, WEATHER)]


def grammar(family: str, choice: Any, parallel: bool = True) -> Any:
    return tool_grammar(form_of(family), TWO, choice, parallel)["format"]


def test_a_grammar_writes_calls_as_the_template_does() -> None:
    found = grammar("hermes", "required")
    begins = [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("add", "get_weather")]
    assert [tag["begin"] for tag in found["tags"]] == begins
    assert {tag["end"] for tag in found["tags"]} == {"}\n</tool_call>"}
    assert (found["separator"], found["at_least_one"]) == ("\n", True)
    named = grammar("hermes", {"name": "get_weather"})
    assert named["tags"] == found["tags"][1:]
    once = grammar("hermes", "required", False)
    assert [one["stop_after_first"] for one in (found, once, named)] == [False, True, True]
    auto = grammar("hermes", "auto", False)
    assert (auto["type"], auto["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert (auto["stop_after_first"], auto["at_least_one"]) == (True, False)


def test_a_choice_becomes_a_sampling_parameter() -> None:
    form = form_of("hermes")
    auto, named = use([ADD]), use([ADD], {"type": "function", "name": "add"})
    assert with_tool_grammar({"seed": 1}, None, auto, form) == ({"seed": 1}, True)
    tag = tool_grammar(form, named.schemas, {"name": "add"}, True)
    found, free = with_tool_grammar({"seed": 1}, None, named, form)
    spec = found.pop("structured_outputs")
    assert (found, free, spec.param, json.loads(spec.text)) == ({"seed": 1}, False, "tools", tag)
    own = ChatSyntax(dataclasses.replace(TOOL_CALL_FAMILIES["hermes"], call_syntax=None), None)
    with pytest.raises(InvalidRequestError, match="tool_call_parser"):
        with_tool_grammar({}, None, named, own)


def test_parameters_have_no_others_unless_they_say_so() -> None:
    def written(parameters: Any) -> Any:
        tool = {"function": {"name": "f", "parameters": parameters}}
        tag = tool_grammar(form_of("hermes"), [tool], "required", True)
        return tag["format"]["tags"][0]["content"]["json_schema"]

    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    assert written(None) == written({}) == closed
    for open_ in (
        {"additionalProperties": True},
        {"patternProperties": {"^x": {}}},
        {"anyOf": [{"required": ["a"]}]},
    ):
        assert written(open_) == {"type": "object", "properties": {}, **open_}
