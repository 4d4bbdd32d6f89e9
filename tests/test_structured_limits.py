"""What a backend would find out in the middle of an output is refused before it begins."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from asyncllm import InvalidRequestError, RequestError
from asyncllm.structured.grammar import GrammarError
from asyncllm.structured.llguidance_backend import LLGuidanceBackend
from asyncllm.structured.references import refuse_endless
from asyncllm.structured.spec import parse_structured_outputs
from tests.structured import ByteRig, accepts, byte_vocabulary

INTEGER = {"type": "integer"}


@pytest.fixture(scope="module")
def llguidance() -> LLGuidanceBackend:
    return LLGuidanceBackend(byte_vocabulary())


def compiled(backend: Any, **asked: Any) -> Any:
    return backend.compile(parse_structured_outputs(asked))


def with_properties(count: int, required: tuple[int, ...] = (), **others: Any) -> dict[str, Any]:
    found = {
        "type": "object",
        "properties": {f"p{i}": INTEGER for i in range(count)},
        "required": [f"p{i}" for i in required],
        "additionalProperties": False,
    }
    return found | others


def last_of(schema: dict[str, Any]) -> str:
    """An object of the required properties and the last."""
    names = [*schema["required"], list(schema["properties"])[-1]]
    places = {name: place for place, name in enumerate(schema["properties"])}
    return json.dumps(dict.fromkeys(sorted(set(names), key=places.__getitem__), 1))


# The most that llguidance takes, and one more.
@pytest.mark.parametrize(
    ("count", "required", "others"),
    [
        (500, (), {}),
        (498, (), {"additionalProperties": True}),
        (1000, (0,), {}),
        (1200, (600,), {}),
        (1800, tuple(range(1800)), {}),
    ],
)
def test_as_many_properties_as_the_parser_takes(llguidance, count, required, others) -> None:
    schema = with_properties(count, required, **others)
    assert accepts(compiled(llguidance, json=schema), last_of(schema))


TOO_MANY = [
    with_properties(501),
    with_properties(499, additionalProperties=True),
    with_properties(1003, (0,)),
    {"anyOf": [with_properties(100) for _ in range(6)]},
    {
        "$defs": {"a": with_properties(300)},
        "anyOf": [{"$ref": "#/$defs/a"}, with_properties(300)],
    },
]
LONG = "deep" * 50
"""A name behind which there are more states than are tried at submission."""

too_many = pytest.mark.parametrize("schema", TOO_MANY, ids=lambda schema: json.dumps(schema)[:40])


@too_many
def test_more_are_refused_where_an_output_begins(llguidance, schema) -> None:
    with pytest.raises(GrammarError, match="max is 2000"):
        compiled(llguidance, json=schema)


@too_many
@pytest.mark.asyncio
async def test_more_within_an_output_end_their_own_request(schema) -> None:
    deep = {
        "type": "object",
        "properties": {LONG: {"type": "array", "items": schema, "minItems": 1}},
        "required": [LONG],
        "additionalProperties": False,
        "$defs": schema.get("$defs", {}),
    }
    async with ByteRig().engine(structured_outputs_backend="llguidance") as engine:
        neighbour = engine.stream("y", max_tokens=200, seed=1)
        alone = engine.stream("y", max_tokens=200, seed=1)
        expected = (await alone.result()).token_ids
        with pytest.raises(RequestError, match="GrammarError") as caught:
            await engine.generate("x", structured_outputs={"json": deep}, max_tokens=400)
        assert "max is 2000" in str(caught.value.__cause__)
        assert (await neighbour.result()).token_ids == expected
        again = await engine.generate("x", structured_outputs={"choice": ["a"]})
        assert again.text == "a"


def test_xgrammar_takes_what_is_past_the_others_limits() -> None:
    from asyncllm.structured.xgrammar_backend import XGrammarBackend

    schema = with_properties(550)
    assert accepts(
        compiled(XGrammarBackend(byte_vocabulary()), json=schema), '{"p3": 1, "p549": 2}'
    )


@pytest.mark.parametrize(
    "grammar",
    [
        "start: " + " | ".join(f'"a{i}"' for i in range(9000)),
        'start: "go " many\nmany: ' + " | ".join(f'"a{i}"' for i in range(9000)),
        "start: " + "a " * 5000 + '\na: "x"?',
        "root ::= " + " | ".join(f'"a{i}"' for i in range(9000)),
    ],
    ids=["at once", "later", "all may be empty", "GBNF"],
)
@pytest.mark.asyncio
async def test_a_grammar_past_the_limits_of_the_parser_is_refused(grammar) -> None:
    async with ByteRig().engine(structured_outputs_backend="llguidance") as engine:
        with pytest.raises(InvalidRequestError, match=r"max is 2000|max is \d+") as caught:
            await engine.generate("x", structured_outputs={"grammar": grammar})
        assert caught.value.param == "structured_outputs"
        assert (await engine.generate("x", structured_outputs={"choice": ["a"]})).text == "a"


# --- references --------------------------------------------------------------------------------

NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
ENDLESS: list[tuple[Any, str]] = [
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
    ({"$ref": "#"}, "#"),
    (NODE, "#"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
     "#/$defs/a"),
    ({"$defs": {"a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1}},
      "properties": {"x": {"$ref": "#/$defs/a"}}}, "#/$defs/a"),
    ({"$defs": {"a": {"type": "object", "required": ["n"],
                      "properties": {"n": {"$ref": "#/$defs/a"}}}},
      "anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/a"}}]}, "#/$defs/a"),
    ({"allOf": [{"type": "null"}, {"$ref": "#"}]}, "#"),
    ({"type": ["array", "object"], "items": {"$ref": "#"}, "minItems": 2, "minProperties": 1,
      "additionalProperties": {"$ref": "#"}}, "#"),
    ({"type": "object", "required": ["x"], "additionalProperties": {"$ref": "#"}}, "#"),
    ({"$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/a~1b"}, "#/$defs/a~1b"),
]  # fmt: skip
WITH_AN_END: list[Any] = [
    {"type": "array", "items": {"$ref": "#"}},
    NODE | {"required": []},
    NODE | {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    {"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1},
    {"$defs": {"never": {"$ref": "#/$defs/never"}}, "type": "null"},
    {"const": {"$ref": "#"}},
    {"properties": {"$ref": {"type": "null"}}},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
    {"oneOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "string"}]},
    {"$ref": "#/$defs/nowhere"},
    {"$ref": "#anchor", "type": 5, "required": 7, "anyOf": {}, "minItems": "1"},
    {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1500)},
     "$ref": "#/$defs/d0"},
]  # fmt: skip


@pytest.mark.parametrize(("schema", "pointer"), ENDLESS, ids=lambda one: str(one)[:60])
def test_a_reference_whose_values_never_end_is_refused_by_name(llguidance, schema, pointer) -> None:
    says = re.escape(f"the $ref '{pointer}") + ".*' leads to values that never end"
    with pytest.raises(GrammarError, match=says):
        compiled(llguidance, json=schema)


@pytest.mark.parametrize("schema", WITH_AN_END, ids=lambda one: str(one)[:60])
def test_a_reference_with_an_end_is_none_such(schema) -> None:
    refuse_endless(schema)


@pytest.mark.parametrize("schema", WITH_AN_END[:4], ids=lambda one: str(one)[:60])
def test_a_schema_within_itself_has_instances(llguidance, schema) -> None:
    grammar = compiled(llguidance, json=schema)
    assert any(accepts(grammar, text) for text in ("[]", "{}", "null", '{"next":null}'))
