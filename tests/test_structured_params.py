"""structured_outputs, response_format and parsed()."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
import pydantic
import pytest
import typing_extensions

from asyncllm import (
    Completion,
    CompletionOutput,
    InvalidOutputError,
    InvalidRequestError,
    SamplingParams,
)
from asyncllm import validation as check
from asyncllm.core.in_process import picklable_params
from asyncllm.structured.response_format import parse_response_format
from asyncllm.structured.spec import (
    MAX_CHOICES,
    MAX_SCHEMA_DEPTH,
    MAX_SPEC_CHARACTERS,
    StructuredOutputs,
)
from tests.refusals import refused


class Model(pydantic.BaseModel):
    name: str
    age: int | None = None


@dataclasses.dataclass
class Place:
    city: str
    people: list[Model]


class Leg(TypedDict):
    start: str


class Trip(TypedDict, total=False):
    legs: typing.Required[list[Leg]]
    by: NotRequired[Literal["train", "bike"] | None]
    note: Annotated[str, pydantic.Field(max_length=9)]


class ExtensionTrip(typing_extensions.TypedDict):
    legs: list[int]


def kept(value: Any) -> StructuredOutputs:
    return SamplingParams(structured_outputs=value).structured_outputs


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ({"json": {"type": "null"}}, "json", '{"type": "null"}'),
        ({"json": '{"type":\n"null"}'}, "json", '{"type": "null"}'),
        ({"json": True}, "json", "{}"),
        ({"json": "true"}, "json", "{}"),
        ({"json": False}, "json", '{"not": {}}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ("b", "ä")}, "choice", '["b", "ä"]'),
        ({"grammar": "start: a"}, "grammar", "start: a"),
        ({"json_object": True}, "json_object", '{"type": "object"}'),
        ({"json_object": True, "regex": None}, "json_object", '{"type": "object"}'),
        (
            {"structural_tag": '{"type": "structural_tag", "format": {}}'},
            "structural_tag",
            '{"type": "structural_tag", "format": {}}',
        ),
    ],
    ids=str,
)
def test_each_kind_is_kept_as_text(value, kind, text):
    found = kept(value)
    assert found == StructuredOutputs(kind, text)
    assert kept(found) is found
    # The executor is sent masks, and no grammar.
    assert picklable_params(SamplingParams(structured_outputs=value)).structured_outputs is None


def test_a_later_change_of_the_schema_is_not_seen():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    found = kept({"json": schema})
    schema["type"] = "array"
    assert list(json.loads(found.text)["properties"]) == ["b", "a"]
    assert json.loads(found.text)["type"] == "object"


CYCLE: dict[str, Any] = {}
CYCLE["items"] = CYCLE
SHARED: list[Any] = []
for _ in range(MAX_SCHEMA_DEPTH - 2):
    SHARED = [SHARED, SHARED]  # written out, 2**46 lists
DEEP = '{"items":' * 5000 + "{}" + "}" * 5000


REFUSED: dict[str, list[Any]] = {
    "json": [5, "{", "5", np.zeros(2), {5: 6}, int, CYCLE, {"enum": SHARED}, DEEP],
    "regex": ["", 5, "a" * 2**14],
    "grammar": ["a" * (MAX_SPEC_CHARACTERS + 1)],
    "choice": [[], "ab", ["a", "a"], ["a", ""], ["a", 5], ["a" * MAX_SPEC_CHARACTERS]],
    "json_object": [False, "yes"],
    "structural_tag": [{"type": "structural_tag"}, []],
    "yaml": ["a"],
}
REFUSED["json"] += [{"const": one} for one in (float("nan"), {1, 2}, "\ud800")]
REFUSED["json"].append({"title": "x" * MAX_SPEC_CHARACTERS})
REFUSED["structural_tag"].append({"type": "structural_tag", "format": {}, "structures": []})
NO_KIND: list[Any] = [{}, 5, "regex", {"json": {}, "regex": "a"}, {5: 6}]


@pytest.mark.parametrize(
    "value",
    [
        *(NO_KIND + [{kind: one} for kind, ones in REFUSED.items() for one in ones]),
        pytest.param({"choice": map(str, range(MAX_CHOICES + 1))}, id="too many choices"),
    ],
    ids=check.describe,  # a repr of one would never end
)
def test_anything_else_is_refused_as_the_parameters_are_made(value):
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        SamplingParams(structured_outputs=value)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Model, {"name": "Mia", "age": 3}),
        (Place, {"city": "Bonn", "people": [{"name": "Mia", "age": None}]}),
        (Trip, {"legs": [{"start": "here"}], "by": "bike"}),
        (ExtensionTrip, {"legs": [1]}),
    ],
)
def test_python_types_make_schemas_and_values(kind, value):
    schema = json.loads(kept({"json": kind}).text)
    required = {Model: ["name"], Place: ["city", "people"]}.get(kind, ["legs"])
    assert (schema["type"], schema["required"]) == ("object", required)
    assert schema["additionalProperties"] is False
    assert all(one["additionalProperties"] is False for one in schema.get("$defs", {}).values())
    found = done(json.dumps(value)).parsed(kind)
    if kind in (Model, Place):
        assert type(found) is kind
        assert pydantic.TypeAdapter(kind).dump_python(found) == value
    else:
        assert found == value


def test_a_type_may_have_other_properties_if_it_says_so():
    class Open(pydantic.BaseModel, extra="allow"):
        by_name: dict[str, int]

    schema = json.loads(kept({"json": Open}).text)
    assert schema["additionalProperties"] is True
    assert schema["properties"]["by_name"]["additionalProperties"] == {"type": "integer"}


def done(text: str, reason: Any = "stop") -> Completion:
    return Completion("r", (1,), (CompletionOutput(0, text, (2,), reason),), None)


@pytest.mark.parametrize("kind", ["x", "list[nowhere]", 7, print, "int("])
def test_non_types_are_refused(kind):
    output = CompletionOutput(0, "1", (), "stop")
    with refused("type", r"^type=.* a type that Pydantic knows"):
        output.parsed(kind)


def test_parsed_reads_json_or_raises_with_its_text():
    assert done('{"a": [1, null]}').parsed() == {"a": [1, None]}
    assert done("[1, 2]").parsed(tuple[int, int]) == (1, 2)
    with pytest.raises(InvalidOutputError, match=r"was cut off \(length\) after 8 char") as caught:
        done('{"a": [1', "length").parsed()
    assert (caught.value.text, caught.value.finish_reason) == ('{"a": [1', "length")
    assert isinstance(caught.value, ValueError)
    for kind in (None, Model):
        with pytest.raises(InvalidOutputError, match="cannot be parsed after 2 characters"):
            done("No").parsed(kind)
    with pytest.raises(InvalidOutputError, match="cut off"):
        done('{"name": "Mi', "length").parsed(Model)
    with pytest.raises(InvalidOutputError, match="cannot be parsed"):
        done("[" * 100_000).parsed()
    with refused("type", "type="):
        done("{}").parsed(object())


SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, kept({"json_object": True})),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            kept({"json": SCHEMA}),
        ),
        (Model, kept({"json": Model})),
        (
            {"type": "structural_tag", "format": {}},
            kept({"structural_tag": {"type": "structural_tag", "format": {}}}),
        ),
    ],
)
def test_response_formats(value, expected):
    found = parse_response_format(value)
    assert found == (expected and dataclasses.replace(expected, param="response_format"))


@pytest.mark.parametrize(
    "value",
    [
        {},
        "json_object",
        {"type": "yaml"},
        {"type": ["text"]},
        {"type": np.zeros(2)},
        {"type": "text", "schema": {}},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": 5, "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": {"const": {1}}}},
    ],
    ids=str,
)
def test_other_response_formats_are_refused(value):
    with refused("response_format"):
        parse_response_format(value)


def test_every_example_of_the_page_runs():
    page = Path(__file__).parent.parent / "docs" / "structured_output.md"
    snippets = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    assert len(snippets) == 5
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for snippet in snippets:
            exec(compile(snippet, page.name, "exec", dont_inherit=True), names)
        assert names["llm"].state == "closed"
    finally:
        names["llm"].close()
