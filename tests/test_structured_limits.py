"""Grammars refused before an output begins."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm import InvalidRequestError
from asyncllm.serving.protocol_error import to_protocol_error
from asyncllm.structured.backends import GrammarBackends
from asyncllm.structured.grammar import GrammarError, Vocabulary, is_gbnf
from asyncllm.structured.json_schema import refuse_many_schemas, refuse_unsupported_by_xgrammar
from asyncllm.structured.lark_rules import LarkRules
from asyncllm.structured.llguidance_backend import (
    LLGuidanceBackend,
    _choices_regex,
    _grammar_to_lark,
)
from asyncllm.structured.merged_schemas import refuse_large_merges
from asyncllm.structured.parser_limits import refuse_unsupported_in_lark
from asyncllm.structured.references import refuse_infinite_references, resolve_pointer
from asyncllm.structured.spec import StructuredOutputs, parse_structured_outputs
from asyncllm.structured.structural_tag import to_lark
from tests.refusals import refused
from tests.structured import ByteRig, accepts, byte_vocabulary, tokens_of

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


def strings(count: int, **others: Any) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(count)}
    return with_properties(0) | {"properties": properties} | others


def last_of(schema: dict[str, Any]) -> str:
    """An object of the required properties and the last."""
    names = [*schema["required"], list(schema["properties"])[-1]]
    places = {name: place for place, name in enumerate(schema["properties"])}
    return json.dumps(dict.fromkeys(sorted(set(names), key=places.__getitem__), 1))


def patterns(count: int) -> list[dict]:
    return [{"type": "string", "pattern": f".*{chr(97 + i)}.*"} for i in range(count)]


CHAIN = {str(i): {"$ref": f"#/$defs/{i + 1}", **one} for i, one in enumerate(patterns(9))}
CHAIN["9"] = {"type": "string"}
OWN = {"properties": {f"q{i}": one for i, one in enumerate(patterns(20))}}
DATES = {"type": "object", "properties": {f"b{i}": {"format": "date"} for i in range(20)}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 9_999_991},
        {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 9.91}]},
        {"type": "object", "properties": {f"p{i}": {"multipleOf": 6000 + i} for i in range(11)}},
        {"allOf": [{"properties": {"a": {"multipleOf": 997 + i}}} for i in range(0, 8, 2)]},
        {"allOf": patterns(36)},
        {"allOf": [{"properties": {"a": one}} for one in patterns(36)]},
        {"allOf": [{"items": one} for one in patterns(9)]},
        {"allOf": [{"additionalProperties": one} for one in patterns(9)]},
        {"allOf": [{"anyOf": [one, {"type": "null"}]} for one in patterns(36)]},
        {"$ref": "#/$defs/0", "$defs": CHAIN},
    ],
    ids=str,
)
def test_endless_schema_merges_are_refused(llguidance, schema) -> None:
    with pytest.raises(GrammarError, match=r"multipleOf has|patterns and formats apply to one"):
        compiled(llguidance, json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 1000, "minimum": 1},
        {"anyOf": patterns(26)},
        {"anyOf": [{"anyOf": patterns(9)}, {"anyOf": patterns(12)}]},
        {"type": "object", "properties": dict(zip("abcdefghijkl", patterns(12), strict=True))},
        {"allOf": [{"$ref": "#/$defs/base"}, OWN], "$defs": {"base": DATES}},
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}},
    ],
    ids=str,
)
def test_constraints_on_different_values_are_counted_apart(schema) -> None:
    refuse_large_merges(schema)


def names(count: int, **others: Any) -> dict[str, Any]:
    """An object with patternProperties of 3 characters each."""
    matched = {f"^{i:02}": {"type": "integer"} for i in range(count)}
    return {"type": "object", "patternProperties": matched, **others}


def tags(*schemas: dict[str, Any]) -> dict[str, Any]:
    made = [{"begin": f"<f{i}>", "schema": one, "end": "<"} for i, one in enumerate(schemas)]
    return {"type": "structural_tag", "structures": made, "triggers": ["<f"]}


def nested(inner: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"a": {"properties": {"b": inner}}}}


def deep(count: int) -> dict[str, Any]:
    """An object with as many merges of an object in it, each of equal schemas."""
    merges = [{"$ref": "#/$defs/x"} for _ in range(count)]
    return {**nested(names(9)), "allOf": merges, "$defs": {"x": nested(names(9))}}


# Each is just below a bound for the number that is named, and above it for the next one.
@pytest.mark.parametrize(
    ("schema", "most", "message"),
    [
        (names, 53, "a work of 100170 "),
        (lambda n: {"allOf": [names(20), *[{"type": "object"}] * n]}, 5, "a work of 106400 "),
        (lambda n: names(20, enum=[{"01": i} for i in range(n)]), 6, "a work of 106400 "),
        (lambda n: names(20, anyOf=[{"minProperties": i} for i in range(n)]), 3,
         "a work of 119700 "),
        (lambda n: {"allOf": [names(n), {"patternProperties": names(20)["patternProperties"]}]},
         31, "a work of 104160 "),
        (lambda n: {"prefixItems": [names(20) for _ in range(n)]}, 7, "a work of 106400 "),
        (lambda n: {"allOf": [{"type": "object"}, *[{"$ref": "#/$defs/x"}] * n],
                    "$defs": {"x": names(20)}}, 2, "a work of 106400 "),
        (lambda n: with_properties(n, tuple(range(n))), 3000,
         "has 3001 properties, expected at most 3000"),
        (lambda n: {"allOf": [{"properties": {f"p{i}": {} for i in part},
                               "required": [f"p{i}" for i in part]}
                              for part in (range(1000), range(1000, n))]}, 3000,
         "has 3001 properties, expected at most 3000"),
        (lambda n: {**with_properties(600, tuple(range(600))),
                    "anyOf": [{"minProperties": i} for i in range(n)]}, 38,
         "too many combinations of schemas"),
        (lambda n: {"type": ["object", "string", "object"][:n]}, 2, "'type' has a type twice"),
    ],
    ids=["patterns", "allOf", "enum", "anyOf", "merged patterns", "objects", "references",
         "properties", "merged properties", "properties of alternatives", "types"],
)  # fmt: skip
def test_schemas_slow_to_compile_are_refused(llguidance, schema, most, message) -> None:
    refuse_large_merges(json.loads(json.dumps(schema(most))))
    with pytest.raises(GrammarError, match=message):
        compiled(llguidance, json=schema(most + 1))
    with pytest.raises(GrammarError, match=message):
        compiled(llguidance, grammar=f"start: %json {json.dumps(schema(most + 1))}")


def test_equal_merges_within_an_object_count_each(llguidance) -> None:
    refuse_large_merges(deep(19))
    with pytest.raises(GrammarError, match="patternProperties take a work of 100800 "):
        compiled(llguidance, json=deep(20))


def test_equal_merges_in_alternatives_count_each(llguidance) -> None:
    schema = {
        "$defs": {"x": {"properties": {"p": {"minProperties": 1}}}},
        "properties": {"p": names(20)},
        "anyOf": [{"$ref": "#/$defs/x"}] * 3,
    }
    refuse_large_merges(json.loads(json.dumps(schema)))
    schema["anyOf"] *= 2
    with pytest.raises(GrammarError, match="patternProperties take a work of"):
        compiled(llguidance, json=schema)


def test_the_schemas_of_one_form_count_together(llguidance) -> None:
    parts = [names(20) for _ in range(8)]
    compiled(llguidance, structural_tag=tags(*parts[:7]))
    with pytest.raises(GrammarError, match="a work of 106400 "):
        compiled(llguidance, structural_tag=tags(*parts))
    rules = [f"p{i}: %json {json.dumps(one)}" for i, one in enumerate(parts)]
    with pytest.raises(GrammarError, match="a work of 106400 "):
        compiled(llguidance, grammar="start: p0\n" + "\n".join(rules))
    assert accepts(compiled(llguidance, grammar="start: p0\n" + "\n".join(rules[:7])), '{"011":1}')
    multiples = [{"type": "integer", "multipleOf": one} for one in (8191, 8192, 3)]
    compiled(llguidance, structural_tag=tags(*multiples[:2]))
    with pytest.raises(GrammarError, match="multipleOf has 16386 remainders"):
        compiled(llguidance, structural_tag=tags(*multiples))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: %json\n\t{HUGE}", "patterns and formats apply"),
        ("start: %json{HUGE}", "patterns and formats apply"),
        ("start: p\np: %lark {\nstart: %json {HUGE}\n}", "patterns and formats apply"),
        ("root ::= %json {HUGE}", "the GBNF cannot be read"),
        ('start: "a" // %json {HUGE}', "patterns and formats apply"),
        ('start: %json {"minimum": ' + "9" * 5000 + "}", "no JSON behind %json at character 13"),
        ("start: %json {'a': 1}", "no JSON behind %json at character 13"),
        ("start: %json " + '{"a":' * 20_000, "no JSON behind %json at character 13"),
        ('start: %json {"$ref": "#"}', "values that never end"),
        (' {"grammars": [{"json_schema": {HUGE}}]}', "begins with '{'"),
        ('{"grammars": [{"lark_grammar": "start: %json {}"}]}', "begins with '{'"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_schema_in_a_grammar_is_checked_as_any_other(llguidance, grammar, message) -> None:
    huge = json.dumps({"allOf": patterns(36)})
    with pytest.raises(GrammarError, match=message):
        compiled(llguidance, grammar=grammar.replace("{HUGE}", huge))


# The most that llguidance takes, and one more.
@pytest.mark.parametrize(
    ("count", "required", "others"),
    [
        (250, (), {}),
        (248, (), {"additionalProperties": True}),
        (500, (0,), {}),
        (600, (300,), {}),
        (1800, tuple(range(1800)), {}),
    ],
)
def test_as_many_properties_as_the_parser_takes(llguidance, count, required, others) -> None:
    schema = with_properties(count, required, **others)
    assert accepts(compiled(llguidance, json=schema), last_of(schema))


TOO_MANY = [
    with_properties(251),
    with_properties(249, additionalProperties=True),
    with_properties(503, (0,)),
    {"anyOf": [with_properties(50) for _ in range(6)]},
    {
        "$defs": {"a": with_properties(150)},
        "anyOf": [{"$ref": "#/$defs/a"}, with_properties(150)],
    },
]
LONG = "deep" * 50
"""A name behind which there are more states than are tried at submission."""

too_many = pytest.mark.parametrize("schema", TOO_MANY, ids=lambda schema: json.dumps(schema)[:40])


@too_many
def test_more_are_refused_where_an_output_begins(llguidance, schema) -> None:
    with pytest.raises(GrammarError, match="max is 1000"):
        compiled(llguidance, json=schema)


@too_many
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
        with refused("structured_outputs", "max is 1000"):
            await engine.generate("x", structured_outputs={"json": deep}, max_tokens=400)
        assert (await neighbour.result()).token_ids == expected
        again = await engine.generate("x", structured_outputs={"choice": ["a"]})
        assert again.text == "a"


def test_xgrammar_compiles_past_llguidance_limits() -> None:
    from asyncllm.structured.xgrammar_backend import XGrammarBackend

    backend = XGrammarBackend(byte_vocabulary())
    assert accepts(compiled(backend, json=with_properties(427)), '{"p3": 1, "p426": 2}')
    with pytest.raises(GrammarError, match="a work of 2002 to compile, expected at most 2000"):
        compiled(backend, json=with_properties(428))


def ranges(count: int) -> dict[str, Any]:
    return {"type": "array", "prefixItems": [{"type": "integer", "minimum": 7}] * count}


@pytest.mark.parametrize(
    ("schema", "work"),
    [
        (ranges(500), 2002),
        (with_properties(272, additionalProperties=True), 2395),
        ({"anyOf": [with_properties(9) for _ in range(101)]}, 2022),
    ],
    ids=["ranges", "an open object", "alternatives"],
)
def test_xgrammar_refuses_schemas_that_take_long_to_compile(schema, work) -> None:
    from asyncllm.structured.xgrammar_backend import XGrammarBackend

    backend = XGrammarBackend(byte_vocabulary())
    with pytest.raises(GrammarError, match=f"a work of {work} to compile"):
        compiled(backend, json=schema)
    with pytest.raises(GrammarError, match=f"a work of {work + 44} to compile"):
        compiled(backend, structural_tag=tags(schema, with_properties(20)))


@pytest.mark.parametrize(
    ("asked", "work"),
    [
        ({"json": strings(26, additionalProperties=True)}, 2001),
        ({"json": strings(135)}, 2001),
        ({"json": with_properties(43)}, 2004),
        ({"json": strings(0, properties={f"p{i}": True for i in range(43)})}, 2075),
        ({"choice": ["x" * 88_000]}, 2062),
        ({"structural_tag": tags(strings(135))}, 2005),
    ],
    ids=["an open object", "properties", "numbers", "any values", "a constant", "a structural tag"],
)
def test_xgrammar_work_grows_with_the_vocabulary(asked, work) -> None:
    """Each takes some 2 s with 152,000 tokens, and is refused before it is compiled."""
    from asyncllm.structured.xgrammar_backend import XGrammarBackend

    assert compiled(XGrammarBackend(byte_vocabulary()), **asked)
    tokens = [bytes([i % 256]) for i in range(152_000)]
    large = XGrammarBackend(Vocabulary(tokens, {}, lambda text: list(text.encode())))
    with pytest.raises(GrammarError, match=f"a work of {work} to compile, expected at most 2000"):
        compiled(large, **asked)


def test_schema_past_llguidance_limits_is_refused_without_xgrammar() -> None:
    backends = GrammarBackends("auto", byte_vocabulary)
    with pytest.raises(GrammarError, match="max is 1000") as caught:
        backends.compile(StructuredOutputs("json", json.dumps(with_properties(251))), lambda: None)
    assert "xgrammar" not in str(caught.value)
    assert list(backends._backends) == ["llguidance"]


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
async def test_a_grammar_past_the_limits_of_the_parser_is_refused(grammar) -> None:
    async with ByteRig().engine(structured_outputs_backend="llguidance") as engine:
        with refused("structured_outputs", "more than 2048 alternatives and parts that may be"):
            await engine.generate("x", structured_outputs={"grammar": grammar})
        assert (await engine.generate("x", structured_outputs={"choice": ["a"]})).text == "a"


BEHIND_A_TEXT = """A: /a/
QUICK: /[b-y ]/
start: q | q "Z0Z1Z2Z3Z4Z5" big
q: QUICK | q QUICK
big: """
MANY = "more than 2048 alternatives and parts that may be empty"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (BEHIND_A_TEXT + "|".join(["A"] * 60_000), MANY),
        (BEHIND_A_TEXT + f"({'|'.join('A' * 2500)}) A", MANY),
        (BEHIND_A_TEXT + f"[{'|'.join('A' * 2500)}] A", MANY),
        (BEHIND_A_TEXT + "A? " * 1100, MANY),
        (BEHIND_A_TEXT + "A* " * 1100, MANY),
        (BEHIND_A_TEXT + "A{0,9} " * 100, MANY),
        (BEHIND_A_TEXT + "A~2 .. 9 " * 100, MANY),
        (BEHIND_A_TEXT + "n " * 2100 + "\nn: A |", MANY),
        (BEHIND_A_TEXT + "N " * 2100 + "\nN: /a*/", MANY),
        (BEHIND_A_TEXT + " | ".join(f"r{i}" for i in range(250))
         + "".join(f"\nr{i}: {'|'.join('A' * 9)}" for i in range(250)), MANY),
        (BEHIND_A_TEXT + "%lark {\nA: /a/\nstart: " + "|".join("A" * 2500) + "\n}", MANY),
        ("root ::= x\nx ::= " + '"a" x | ' * 2500 + '"b"', MANY),
        ("start: " + "a " * 300 + "\na: " + '"a" | ' * 150, r"take 45300 completions .* 16384"),
        ("start: y\ny: " + "".join(f'"a" y b{i} | ' for i in range(17)) + '"Z"'
         + "".join(f'\nb{i}: "b"?' for i in range(17)), "17 alternatives may end with their own"),
        ("start: e x::0\ne: /b?/\nx::_: e x::incr(_) %if lt(_, 90000) | /a/",
         "rules with parameters"),
    ],
    ids=["a rule", "a group", "an option", "?", "*", "{}", "~", "empty rules", "empty terminals",
         "many rules", "nested", "GBNF", "completions", "right recursion", "parameters"],
)  # fmt: skip
def test_rules_that_make_long_rows_are_refused_before_compilation(
    llguidance, grammar, message, monkeypatch
) -> None:
    """llguidance makes a whole row before it looks at its limits: seconds for one mask, for several
    of these."""
    monkeypatch.setattr(llguidance._library, "LLMatcher", None)
    with pytest.raises(GrammarError, match=message):
        llguidance._check_rules(_grammar_to_lark(grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        "start: W\nW: " + " | ".join(f'"a{i}"' for i in range(4000)),
        "start: " + " ".join(f"w{i}" for i in range(8))
        + "".join(f"\nw{i}: " + " | ".join(f'"a{j}"' for j in range(250)) for i in range(8)),
        "start: " + '"a" ' * 5000,
        "start: " + "e " * 500 + "\ne: " + " | ".join(f'"k{i},"i /a*/' for i in range(200)),
        "start: " + "e " * 500 + "\ne: " + " | ".join(f"K{i} /a*/" for i in range(200))
        + "".join(f'\nK{i}: "k{i},"' for i in range(200)),
        'a400: "z"\nstart: a0' + "".join(f'\na{i}: "{i}" a{i + 1} | "x"' for i in range(400)),
    ],
    ids=["a terminal", "rules of texts", "a sequence", "different texts", "different terminals",
         "a chain of rules"],
)  # fmt: skip
def test_long_grammars_of_short_rows_are_compiled(llguidance, grammar) -> None:
    compiled(llguidance, grammar=grammar)


@pytest.mark.parametrize(
    ("grammar", "count"),
    [
        ('start: e\ne: e "+" t | t\nt: "(" e ")" | "n"', 0),
        ('start: e\ne: t "+" e | t "-" e | t\nt: "(" e ")" | "n"', 1),
        ('start: y\ny: "xa" y "b"? | "a" y | "Z"', 2),
        ('start: y\ny: "xa" y | A y | "A"i y | "Z"\nA: "a"', 3),
        ('start: y\ny: "xa" y "b" | "a" y | "Z"', 1),
        ('start: y\ny: "a" z\nz: y B | "Z"\nB: /b*/', 2),
        ('start: y\ny: "a" z\nz: y B | "Z"\nB: /b+/', 0),
        ('start: y\ny: "a" y{1,3} | "Z"', 4),
        ('start: (x? y*)*\nx: "a"\ny: "b"', 0),
        ('start: x\nx: y | "a"\ny: x | "b"', 0),
        ('start: %lark {\nstart: y\ny: ("a" y)* "Z"?\n}', 3),
        ('%import common (INT, WS)\n%ignore WS\n?start[capture="a"]: w -> b\n  | INT\n'
         'w[lazy]: /a*/ "b"', 0),
    ],
)  # fmt: skip
def test_parts_that_lead_back_to_their_rules_are_counted(grammar, count) -> None:
    assert LarkRules(grammar).count_right_recursive_parts() == count


def test_output_under_right_recursion_is_bounded(llguidance, monkeypatch) -> None:
    """One token may complete all rows: the text ends every ``y``."""
    grammar = 'start: y\ny: "a" y "b"? | "Z0"'
    made = compiled(llguidance, grammar=grammar)
    made.mask_speed.num_quick_masks = 1000
    assert not made.mask_speed.is_known_quick
    assert accepts(made, "aaaZ0bb")
    monkeypatch.setattr("asyncllm.structured.parser_limits.MAX_RIGHT_RECURSION_WORK", 3 * 20**2)
    matcher = compiled(llguidance, grammar=grammar).new_matcher()
    for _ in range(30):
        assert matcher.accept(ord("a"))
        matcher.rollback(1)
    for _ in range(20):
        assert matcher.accept(ord("a"))
    with pytest.raises(InvalidRequestError, match="more than 20 bytes under rules that end with"):
        matcher.accept(ord("a"))
    left = compiled(llguidance, grammar='start: y\ny: y "a" | "a"')
    left.mask_speed.num_quick_masks = 1000
    assert left.mask_speed.is_known_quick
    assert accepts(left, "a" * 100)


@pytest.mark.parametrize("text", ["start: x[0]", "start: §", "start: %json", "start: ) a"])
def test_syntax_that_is_not_lark_is_refused(llguidance, text) -> None:
    with pytest.raises(GrammarError, match=r"[Ee]xpect|lexer error"):
        compiled(llguidance, grammar=text)


def values(count: int, **others: Any) -> dict[str, Any]:
    """A schema of an object that comes behind the states tried at submission."""
    return {**with_properties(0), "properties": {LONG: {"enum": [[i] for i in range(count)]}},
            "required": [LONG], **others}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        (values(4000), False),
        (values(4200), True),
        ({"items": with_properties(1000)}, False),
        ({"items": with_properties(1030)}, True),
        ({"items": with_properties(1030, (500,))}, False),
        ({"items": {"anyOf": [with_properties(100) for _ in range(11)]}}, True),
        ({"items": with_properties(100, anyOf=[{"minProperties": i} for i in range(11)])}, True),
        ({"items": with_properties(100, anyOf=[{"minProperties": i} for i in range(9)])}, False),
    ],
    ids=lambda one: str(one)[:60],
)
def test_schemas_that_make_long_rows_are_refused_before_compilation(schema, is_refused) -> None:
    if not is_refused:
        return refuse_large_merges(schema)
    with pytest.raises(GrammarError, match="more than 4096 schemas apply to one value"):
        refuse_large_merges(schema)


def test_schemas_that_begin_at_the_same_place_count_together() -> None:
    message = "values of more than 4096 schemas may begin at the same place"
    many = [with_properties(60) for _ in range(20)]
    to_lark(tags(*many))
    with pytest.raises(GrammarError, match=message):
        to_lark(tags(*many) | {"structures": [
            {"begin": "<f>", "schema": one, "end": "<"} for one in many]})  # fmt: skip
    with pytest.raises(GrammarError, match=message):
        refuse_unsupported_in_lark("\n".join(f"p: %json {json.dumps(one)}" for one in many))
    form = {"type": "or", "elements": [{"type": "json_schema", "json_schema": one} for one in many]}
    with pytest.raises(GrammarError, match=message):
        to_lark({"type": "structural_tag", "format": form})


# --- work ---------------------------------------------------------------------------------------

TEXT = {"type": "string"}
NESTED = {"grammar": 'start: x*\nx: y*\ny: z*\nz: "a"*'}


def closed(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    kinds = {"type": "object", "properties": properties, "required": required}
    return {**kinds, "additionalProperties": False}


CODES = [f"{a}{b}{n}" for a in "ABCDEFGH" for b in "KLMNOP" for n in range(10)]
FORMATS = {
    "email": "mia@example.org", "date": "2026-11-23", "date-time": "2026-11-23T10:05:53Z",
    "uuid": "123e4567-e89b-12d3-a456-426614174000", "ipv4": "10.0.0.1", "ipv6": "2001:db8::1",
    "hostname": "a.example.org", "uri": "https://example.org/a?b=c", "time": "10:05:53Z",
    "duration": "P1DT2H",
}  # fmt: skip
NODE_OF_TREE = closed(
    {"value": INTEGER, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
     "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "children", "next",
)  # fmt: skip
TOOLS = [closed({"city": TEXT, "days": INTEGER, f"only_{i}": TEXT}, f"only_{i}") for i in range(64)]
OF_PRACTICE: list[tuple[dict[str, Any], str]] = [
    ({"json": closed({name: {"type": "string", "format": name} for name in FORMATS})},
     json.dumps(FORMATS)),
    ({"json": closed({"codes": {"type": "array", "items": {"enum": CODES}}})},
     json.dumps({"codes": CODES[::7]})),
    ({"json": {"type": "array", "items": {"anyOf": [
        closed({"kind": {"const": f"kind_{i}"}, "v": TEXT, f"n{i}": INTEGER}, f"n{i}")
        for i in range(40)]}}},
     json.dumps([{"kind": f"kind_{i}", "v": "x", f"n{i}": i} for i in range(0, 40, 5)])),
    ({"json": {"$defs": {"node": NODE_OF_TREE}, "$ref": "#/$defs/node"}},
     '{"value": 1, "children": [{"value": 2, "next": {"value": 3}}, {"value": 4, "next": null}]}'),
    ({"json": closed({f"property_{i}": [TEXT, INTEGER][i % 2] for i in range(120)},
                     *(f"property_{i}" for i in range(120)))},
     '{"property_2": "x", "property_3": 3, "property_118": "y"}'),
    ({"json": closed({
        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,8}(-[a-z0-9]+)*$"},
        "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+(-[\w.]+)?(\+[\w.]+)?$"},
        "word": {"type": "string", "pattern": r"^\w{1,64}$"},
        "note": {"type": "string", "maxLength": 20_000}})},
     '{"sku": "ABC-1234-a1", "version": "1.20.3-rc.1+x", "word": "Groesse", "note": "n"}'),
    ({"json": {"type": "array", "items": INTEGER, "minItems": 3, "maxItems": 1000}},
     json.dumps(list(range(200)))),
    ({"json": {"type": "array", "items": {"type": "array", "items": closed({"a": TEXT})}}},
     '[[{"a": "b"}, {"a": "c"}], []]'),
    ({"json_object": True}, '{"any": [1, {"thing": null}], "b": "c"}'),
    ({"structural_tag": {"type": "structural_tag", "triggers": ["<function="], "structures": [
        {"begin": f"<function=tool_{i}>", "schema": tool, "end": "</function>"}
        for i, tool in enumerate(TOOLS)]}},
     'I ask. <function=tool_63>{"city": "Bonn", "days": 3}</function>'),
    ({"structural_tag": {"type": "structural_tag", "format": {
        "type": "tags_with_separator", "separator": "\n", "at_least_one": True, "tags": [
            {"type": "tag", "begin": f'{{"name": "tool_{i}", "arguments": ', "end": "}",
             "content": {"type": "json_schema", "json_schema": tool}}
            for i, tool in enumerate(TOOLS)]}}},
     '{"name": "tool_7", "arguments": {"city": "Ulm", "days": 1, "only_7": "x"}}\n' * 3
     + '{"name": "tool_9", "arguments": {"city": "Ulm", "days": 1}}'),
    ({"grammar": "start: expr\nexpr: expr ADD term | term\nterm: term MUL atom | atom\n"
      'atom: /[0-9]+/ | NAME | "(" expr ")" | NAME "(" (expr ("," expr)*)? ")"\n'
      'ADD: "+" | "-"\nMUL: "*" | "/"\nNAME: /[a-z]+/'},
     "max(1,(22+x)*3)-4*(y-f(2,3,4))/5+" * 6 + "1"),
    ({"grammar": 'start: item (", " item)*\nitem: '
      + " | ".join(f'"item {i}"' for i in range(200))},
     ", ".join(f"item {i}" for i in range(0, 200, 9))),
    ({"grammar": 'start: line+\nline: WORD (" " WORD)* "\\n"\nWORD: /[a-zA-Z]+/'},
     "some words of a line\n" * 20),
    ({"regex": r"([A-Z][a-z]+ ){1,50}[0-9]{4}-[0-9]{2}"}, "Mia And Tom Go Home " * 5 + "2026-11"),
]  # fmt: skip
"""Forms as applications ask for them, with an output of each."""


@pytest.mark.parametrize(("asked", "text"), OF_PRACTICE, ids=lambda one: str(one)[:50])
def test_forms_of_practice_stay_below_the_limits(llguidance, asked, text) -> None:
    matcher = compiled(llguidance, **asked).new_matcher()
    for byte in text.encode():
        assert byte in tokens_of(matcher.bitmask())
        assert matcher.accept(byte)
    assert matcher.may_end()


def written(backend: Any, asked: dict[str, Any], text: str) -> tuple[int, InvalidRequestError]:
    """How many bytes of a repeated text an output may have, and the error that ends it."""
    matcher = compiled(backend, **asked).new_matcher()
    for count in range(5000):
        try:
            matcher.bitmask()
            assert matcher.accept(ord(text[count % len(text)]))
        except InvalidRequestError as error:
            return count, error
    raise AssertionError("nothing bounds it")


def tags_within_tags(depth: int) -> dict[str, Any]:
    form: dict[str, Any] = {"type": "const_string", "value": "a"}
    for _ in range(depth):
        tag = {"type": "tag", "begin": "", "content": form, "end": ""}
        form = {"type": "tags_with_separator", "separator": "", "tags": [tag]}
    return {"structural_tag": {"type": "structural_tag", "format": form}}


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        (NESTED, 45),
        ({"grammar": 'start: e\ne: e e e | e e | "a" |'}, 60),
        ({"grammar": 'start: (a b c)*\na: "a"*\nb: a*\nc: b*'}, 45),
        (tags_within_tags(3), 60),
    ],
    ids=lambda one: str(one)[:40],
)
def test_an_ambiguous_grammar_ends_after_the_same_few_tokens(llguidance, asked, most) -> None:
    """Each token of it adds items, and a token costs the square of them and more."""
    count, error = written(llguidance, asked, "a")
    assert 8 < count <= most
    assert error.param == "structured_outputs"
    assert str(error).startswith("structured_outputs.")
    again, same = written(llguidance, asked, "a")
    assert (again, str(same)) == (count, str(error))


def tag_of(*elements: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "sequence", "elements": list(elements)}
    return {"structural_tag": {"type": "structural_tag", "format": form}}


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "(((a?){0,99}){0,99})*"},
        {"grammar": 'root ::= x*\nx ::= y*\ny ::= "a"*'},
        {"grammar": 'start: "a"'},
        tag_of({"type": "regex", "pattern": "(a*)*"}),
        tag_of({"type": "grammar", "grammar": 'root ::= "a"'}),
        tag_of(*[{"type": "any_text"}] * 5),
        tags_within_tags(2),
    ],
    ids=lambda one: str(one)[:60],
)
def test_xgrammar_refuses_forms_that_may_be_ambiguous(asked) -> None:
    """A mask of the first takes a minute, and nothing can end it."""
    from asyncllm.structured.xgrammar_backend import XGrammarBackend

    with pytest.raises(GrammarError, match=r"no limit of work for .* expected the llguidance"):
        compiled(XGrammarBackend(byte_vocabulary()), **asked)


def test_xgrammar_takes_long_outputs_of_schemas_and_choices() -> None:
    from asyncllm.structured.xgrammar_backend import XGrammarBackend

    backend = XGrammarBackend(byte_vocabulary())
    schema = {"type": "array", "items": {"type": "string"}}
    assert accepts(compiled(backend, json=schema), json.dumps(["some text"] * 200))
    assert accepts(compiled(backend, choice=["yes " * 500, "no"]), "yes " * 500)


async def test_its_request_fails_alone_and_by_name() -> None:
    async with ByteRig(eos=False).engine(structured_outputs_backend="llguidance") as engine:
        alone = (await engine.generate("y", max_tokens=100, seed=1)).token_ids
        neighbour = engine.stream("y", max_tokens=100, seed=1)
        with pytest.raises(InvalidRequestError, match="too complex for the next token") as caught:
            await engine.generate("x", structured_outputs=NESTED, max_tokens=400)
        answer = to_protocol_error(caught.value, {})
        assert (answer.status, answer.param) == (400, "structured_outputs")
        assert (await neighbour.result()).token_ids == alone


# --- choices -------------------------------------------------------------------------------------


@given(st.lists(st.text("ab|(\\é", min_size=1, max_size=6), min_size=1, max_size=12, unique=True))
def test_choice_expression_matches_exactly_its_choices(choices: list[str]) -> None:
    spelled = re.sub(
        r"\\x\{(\w+)\}", lambda m: f"\\x{int(m[1], 16):02x}", _choices_regex(sorted(choices))
    )
    found = re.compile(spelled)
    for text in {part for one in choices for part in (one, one[:-1], one + "a", "b" + one)}:
        assert bool(found.fullmatch(text)) == (text in choices)


def test_common_prefix_of_choices_is_written_once(llguidance) -> None:
    shared = "the same beginning of " * 40
    choices = [f"{shared}{i}" for i in range(120)]
    assert len(_choices_regex(sorted(choices))) < 2 * len(_choices_regex([shared])) + 2000
    grammar = compiled(llguidance, choice=choices)
    assert all(accepts(grammar, one) for one in choices[::17])
    assert not accepts(grammar, shared)
    assert not accepts(grammar, shared + "120")
    chain = ["a" * count for count in range(1, 200)]
    grammar = compiled(llguidance, choice=chain)
    assert all(accepts(grammar, one) for one in (chain[0], chain[99], chain[-1]))
    assert not accepts(grammar, "a" * 200)


def test_a_mask_tokenises_little_of_a_long_forced_text() -> None:
    asked: list[int] = []

    def encode(text: str) -> list[int]:
        asked.append(len(text))
        return list(text.encode())

    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)], {}, encode)
    text = "one long choice " * 60
    matcher = compiled(LLGuidanceBackend(vocabulary), choice=[text]).new_matcher()
    for byte in text.encode():
        assert tokens_of(matcher.bitmask()) == {byte}
        assert matcher.accept(byte)
    assert asked
    assert max(asked) <= 64


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
def test_endless_reference_is_refused_by_name(llguidance, schema, pointer) -> None:
    says = re.escape(f"the $ref '{pointer}") + ".*' leads to values that never end"
    with pytest.raises(GrammarError, match=says):
        compiled(llguidance, json=schema)


@pytest.mark.parametrize("schema", WITH_AN_END, ids=lambda one: str(one)[:60])
def test_finite_recursion_is_accepted(schema) -> None:
    refuse_infinite_references(schema)


@pytest.mark.parametrize("schema", WITH_AN_END[:4], ids=lambda one: str(one)[:60])
def test_a_schema_within_itself_has_instances(llguidance, schema) -> None:
    grammar = compiled(llguidance, json=schema)
    assert any(accepts(grammar, text) for text in ("[]", "{}", "null", '{"next":null}'))


def chained(count: int, link) -> dict:
    """A schema whose definitions lead from each to the next."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": defs | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


class CountedDict(dict):
    """A schema that counts how often the keywords of all of them are read."""

    num_reads = 0

    def get(self, key: Any, default: Any = None) -> Any:
        CountedDict.num_reads += 1
        return super().get(key, default)


def nested_objects(depth: int, end: str, **others: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"$ref": f"#/$defs/{end}"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]} | others
    return {"$ref": "#/$defs/x", "$defs": {"x": schema, "end": {}}}


def overlapping_targets(count: int, depth: int) -> dict[str, Any]:
    """A long schema that references decide one by one, itself the target of many references."""
    refs = [{"$ref": f"#/$defs/{i}"} for i in range(count)]
    inner: Any = {"allOf": [{}] * 500 + refs}
    for _ in range(depth):
        inner = {"anyOf": [inner]}
    ways = [{"$ref": "#/$defs/inner" + "/anyOf/0" * i} for i in range(depth + 1)]
    return {"$defs": {"inner": inner} | {f"{i}": {} for i in range(count)}, "prefixItems": ways}


@pytest.mark.parametrize(
    "schema",
    [
        nested_objects(12, "end", required=["a"] * 2),
        nested_objects(12, "x", type=["object"] * 2),
        overlapping_targets(60, 20),
    ],
    ids=["required", "type", "targets"],
)
def test_the_search_for_endless_references_is_linear(schema) -> None:
    made: list[CountedDict] = []

    def make(pairs: list[tuple[str, Any]]) -> CountedDict:
        made.append(CountedDict(pairs))
        return made[-1]

    root = json.loads(json.dumps(schema), object_pairs_hook=make)
    CountedDict.num_reads = 0
    with suppress(GrammarError):
        refuse_infinite_references(root)
    assert CountedDict.num_reads <= 25 * len(made)


def test_a_reference_is_resolved_once_for_all_alternatives(monkeypatch) -> None:
    resolved: list[str] = []

    def resolve(pointer: str, root: Any) -> Any:
        resolved.append(pointer)
        return resolve_pointer(pointer, root)

    monkeypatch.setattr("asyncllm.structured.merged_schemas.resolve_pointer", resolve)
    others = {"additionalProperties": {"$ref": "#" + "/" * 1000}}
    refuse_large_merges(strings(20, **others, anyOf=[{"minProperties": i} for i in range(40)]))
    assert len(resolved) == 1


def test_only_a_text_is_a_pattern() -> None:
    refuse_large_merges({"allOf": [{"pattern": [i], "format": {"f": i}} for i in range(40)]})
    with pytest.raises(GrammarError, match="9 patterns and formats"):
        refuse_large_merges({"allOf": [{"pattern": str(i)} for i in range(9)]})


@pytest.mark.parametrize(
    "others",
    [{"items": [0] * 5000}, {"prefixItems": [0] * 5000}, {"allOf": [True] * 2500}],
    ids=lambda one: next(iter(one)),
)
def test_entries_that_are_no_schemas_count_too(llguidance, others) -> None:
    schema = {**others, "anyOf": [{"minItems": i} for i in range(1500)]}
    with pytest.raises(GrammarError, match="too many combinations of schemas"):
        compiled(llguidance, json=schema)
    refuse_large_merges({**others, "anyOf": schema["anyOf"][:50]})


@pytest.mark.parametrize("kind", ["json", "grammar", "structural_tag"])
def test_subschemas_of_a_form_are_bounded(llguidance, kind) -> None:
    schema = {"properties": {"a": {"anyOf": [{}] * 8_190}}}
    refuse_many_schemas(schema)
    schema["properties"]["b"] = {}
    forms = {
        "json": schema,
        "grammar": f"start: %json {json.dumps(schema)}",
        "structural_tag": tags(schema["properties"]["a"], {}, {}),
    }
    with pytest.raises(GrammarError, match="has 8193 subschemas, expected at most 8192"):
        compiled(llguidance, **{kind: forms[kind]})


def test_required_names_are_not_searched_in_a_list() -> None:
    class Names(list):
        def __contains__(self, name: object) -> bool:
            raise AssertionError("each name would be compared with all")

    schema = {"type": "object", "properties": Names("abc"), "required": ["c"]}
    refuse_unsupported_by_xgrammar(schema)
    with pytest.raises(GrammarError, match="the required 'd'"):
        refuse_unsupported_by_xgrammar(schema | {"required": ["d"]})


def test_a_trigger_is_found_without_trying_each() -> None:
    class Begin(str):
        def startswith(self, *_: Any) -> bool:
            raise AssertionError("each tag would try all triggers")

    tag = {"type": "tag", "begin": Begin("<ab>"), "end": "",
           "content": {"type": "const_string", "value": "x"}}  # fmt: skip
    for triggers, head in ((["x", 3, "<a", "<", "<ab", "<a"], "<a"), (["<ab>c", "<"], "<")):
        form = {"type": "triggered_tags", "triggers": triggers, "tags": [tag]}
        assert f'TEXT "{head}"' in to_lark({"type": "structural_tag", "format": form})
    for triggers in ([], ["b"], ["", "<"]):
        form = {"type": "triggered_tags", "triggers": triggers, "tags": [tag]}
        with pytest.raises(GrammarError, match="no trigger begins"):
            to_lark({"type": "structural_tag", "format": form})


def test_gbnf_is_recognised_in_one_pass() -> None:
    """With a pass for each line this takes seconds, and 131,072 lines minutes."""
    began = time.process_time()
    assert not is_gbnf("\n" * 20_000)
    assert time.process_time() - began < 1
    for text in ("root ::= x", "\n\n\troot::=x", "# a\n r-1 \n ::= x", "a\nb ::= c"):
        assert is_gbnf(text)
    assert not is_gbnf('start: "a ::= b"')


@pytest.mark.parametrize(
    "text",
    ["".join(f"{i} ::= {i + 1}\n" for i in range(900)) + 'root ::= "a"',
     "#\n" * 20_000 + 'root ::= "a"'],
    ids=["rules", "comments"],
)  # fmt: skip
def test_gbnf_that_takes_long_to_convert_is_refused(llguidance, text) -> None:
    with pytest.raises(GrammarError, match=r"takes a work of \d+ to convert .* at most 8388608"):
        compiled(llguidance, grammar=text)
    rules = "".join(f"r{i} ::= r{i + 1}\n" for i in range(60)) + 'r60 ::= "a"\nroot ::= r0'
    assert accepts(compiled(llguidance, grammar="# letters\n" * 60 + rules), "a")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", chained(2500, lambda ref: ref)),
        ("json", chained(2500, lambda ref: {"allOf": [ref]})),
        (
            "grammar",
            "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"',
        ),
        (
            "grammar",
            "start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(3000)) + "R3000: /a/",
        ),
        ("grammar", "start: %json " + json.dumps(chained(2500, lambda ref: ref))),
        (
            "grammar",
            "start: %json "
            + json.dumps(chained(2500, lambda ref: ref)).replace('"$ref"', '"\\u0024ref"'),
        ),
    ],
)
def test_long_schema_chains_are_refused_early(kind, value):
    """One of these ended the process: llguidance follows them on its stack."""
    with pytest.raises(InvalidRequestError, match="at most 512 references and rules"):
        parse_structured_outputs({kind: value})


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_references_that_multiply_are_refused(keyword):
    """Thirty levels of two equal references took gigabytes, or a core until the end of time."""
    schema = chained(30, lambda ref: {keyword: [ref, dict(ref)]})
    began = time.process_time()
    with pytest.raises(GrammarError, match="more than 4096 schemas"):
        refuse_large_merges(schema)
    assert time.process_time() - began < 1
    refuse_large_merges(chained(8, lambda ref: {keyword: [ref, dict(ref)]}))
