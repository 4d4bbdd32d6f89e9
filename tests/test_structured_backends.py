"""Grammar backends: the JSON-Schema test suite, masks and tokens."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM, InvalidRequestError
from asyncllm.structured.backends import with_first_mask
from asyncllm.structured.grammar import Grammar, GrammarError, GrammarMatcher, Vocabulary
from asyncllm.structured.llguidance_backend import LLGuidanceBackend
from asyncllm.structured.spec import StructuredOutputs, parse_structured_outputs
from tests import tokenizer_kinds
from tests.structured import accepts, assert_valid, byte_vocabulary, random_schema, tokens_of


def backend(name: str, vocabulary: Vocabulary | None = None) -> Any:
    if name == "llguidance":
        return LLGuidanceBackend(vocabulary or byte_vocabulary())
    from asyncllm.structured.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary or byte_vocabulary())


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def either(request):
    return request.param, backend(request.param)


def spec(**asked: Any) -> StructuredOutputs:
    found = parse_structured_outputs(asked)
    assert found is not None
    return found


def compiled(compiler: Any, **asked: Any) -> Grammar:
    grammar = compiler.compile(spec(**asked))
    with_first_mask(grammar)
    return grammar


def spellings(value: Any) -> Iterator[str]:
    """A value's JSON with each object's keys in each order: a grammar has one of them."""
    if isinstance(value, dict):
        keys = list(value)
        for order in itertools.permutations(keys) if len(keys) < 5 else [keys]:
            for parts in itertools.product(*(list(spellings(value[key])) for key in order)):
                pairs = zip(order, parts, strict=True)
                names = (f"{json.dumps(k, ensure_ascii=False)}:{part}" for k, part in pairs)
                yield "{" + ",".join(names) + "}"
    elif isinstance(value, list):
        for parts in itertools.product(*(list(spellings(one)) for one in value)):
            yield "[" + ",".join(parts) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def admits(grammar: Grammar, value: Any) -> bool:
    return any(accepts(grammar, text) for text in itertools.islice(spellings(value), 200))


# --- keywords --------------------------------------------------------------------------------

OBJECT = {"type": "object", "additionalProperties": False}
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "minimum": 3, "maximum": 12}, [3, 12], [2, 13, "3", 3.5]),
    ({"type": "boolean"}, [True, False], [None, 0, "true"]),
    ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2, False]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, {}]),
    (
        OBJECT | {"properties": {"a": {"type": "null"}, "b": {}}, "required": ["a"]},
        [{"a": None}, {"a": None, "b": [1]}],
        [{}, {"b": 1}, {"a": None, "c": 1}],
    ),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, [[], [None]], [[1], [None] * 3]),
    (
        {"type": "array", "prefixItems": [{"type": "null"}], "items": False, "minItems": 1},
        [[None]],
        [[], [None, None]],
    ),
    ({"anyOf": [{"type": "null"}, {"const": 5}]}, [None, 5], [6, "null"]),
    (
        {
            "$defs": {
                "n": OBJECT
                | {"properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
                | {"required": ["n"]}
            },
            "$ref": "#/$defs/n",
        },
        [{"n": None}, {"n": {"n": None}}],
        [{"n": {}}, {"n": 5}],
    ),
]
ONLY_LLGUIDANCE: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["äb", 'a"\n'], ["a", "abcd"]),
    ({"type": "string", "pattern": "b+"}, ["abba"], ["", "a"]),
    ({"type": "string", "format": "date"}, ["2026-11-22"], ["22.11.2026", ""]),
    ({"type": "integer", "multipleOf": 4}, [8, -4], [2]),
    ({"type": ["string", "null"]}, ["", None], [5]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2, "3"]),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [3, None], ["3"]),
    ({"properties": {"a": {"type": "null"}}}, [{"a": None}, 5, {"b": 1}], [{"a": 1}]),
    (
        {"type": "object", "minProperties": 1, "maxProperties": 2},
        [{"a": 1}],
        [{}, dict(a=1, b=1, c=1)],
    ),
    (
        OBJECT | {"patternProperties": {"^x": {"type": "null"}}},
        [{"xy": None}],
        [{"xy": 1}, {"y": 1}],
    ),
]
NEITHER = """not if contains uniqueItems propertyNames dependentRequired unevaluatedProperties
$dynamicRef nullable minlength x-guidance""".split()


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case[0])[:60])
def test_backend_admits_what_schema_admits(either, case):
    schema, valid, invalid = case
    grammar = compiled(either[1], json=schema)
    for value in valid:
        assert admits(grammar, value), value
    for value in invalid:
        assert not admits(grammar, value), value


@pytest.mark.parametrize("case", ONLY_LLGUIDANCE, ids=lambda case: json.dumps(case[0])[:60])
def test_schemas_xgrammar_mishandles_go_to_llguidance(either, case):
    if either[0] == "xgrammar":
        with pytest.raises(GrammarError, match="not enforced"):
            compiled(either[1], json=case[0])
    else:
        test_backend_admits_what_schema_admits(either, case)


@pytest.mark.parametrize("keyword", NEITHER)
@pytest.mark.parametrize("where", ["top", "within"])
def test_schemas_unenforceable_by_both_are_refused_by_name(either, keyword, where):
    schema: dict[str, Any] = {"type": "object", keyword: {}}
    if where == "within":
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match=re.escape(keyword)):
        compiled(either[1], json=schema)
    # As a name or as data it is no keyword.
    grammar = compiled(either[1], json=OBJECT | {"properties": {keyword: {"const": {keyword: 1}}}})
    assert admits(grammar, {keyword: {keyword: 1}})


def test_choices(either):
    odd = ["a", 'q"\\', "nö\n", "日本", "\x7f", "^$.*"]
    for text in odd:
        assert accepts(compiled(either[1], choice=odd), text)
    assert not accepts(compiled(either[1], choice=odd), "b")


def test_regexes_and_grammars():
    compiler = backend("llguidance")
    assert accepts(compiled(compiler, regex="^[a-c]{2}é?$"), "abé")
    assert not accepts(compiled(compiler, regex="^[a-c]{2}é?$"), "a")
    for text in (
        'root ::= "a" [0-9]+ | "b"',
        'root ::=\n  "a" [0-9]+ | "b" # start: "c"',
        'start: "a" /[0-9]+/ | "b"',
        '?start: "a" /[0-9]+/ | "b"',
        '!start: "a" /[0-9]+/ | "b"',
        'start[capture]: "a" /[0-9]+/ | "b"',
        'start[capture] : "a" N | "b" // root ::= "c"\nN: /[0-9]+/',
        'start: "a" N | "b" | "::="\nN: /[0-9]+/',
    ):
        grammar = compiled(compiler, grammar=text)
        assert [accepts(grammar, one) for one in ("a12", "b", "a", "c")] == [True] * 2 + [False] * 2


STRUCTURES = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=add>", "schema": CASES[0][0], "end": "</f>"},
        {"begin": "<f=no>", "schema": {"type": "null"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAG: dict[str, Any] = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema"},
    "end": "</f>",
}


def test_structural_tags(either):
    name, compiler = either
    grammar = compiled(compiler, structural_tag=STRUCTURES)
    for text in ("", "hello", "a <f=add>7</f> b <f=no>null</f>", "a < b"):
        assert accepts(grammar, text), text
    for text in ("<f=add>77</f>", "<f=mul>7</f>", "<f=add>7", "<f=no>7</f>"):
        assert not accepts(grammar, text), text
    null, two = {"type": "null"}, {"enum": [1, 2]}
    tags = [TAG | {"begin": f"<{n}>", "content": {**TAG["content"], "json_schema": schema}}
            for n, schema in (("f", null), ("g", two))]  # fmt: skip
    calls = {"type": "tags_with_separator", "tags": tags, "separator": ";", "at_least_one": True}
    once = {**calls, "stop_after_first": True}
    around = {"type": "sequence", "elements": [{"type": "const_string", "value": "["}, once]}
    free = {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "stop_after_first": True}
    f, g = "<f>null</f>", "<g>2</f>"
    for form, good, bad in (
        (tags[0], [f], ["", g, f + f]),
        (calls, [f, g + ";" + f], ["", f + g, f + ";", "<g>3</f>"]),
        (once, [f, g], ["", f + ";" + f]),
        (around, ["[" + f], [f, "["]),
        (free, ["no call", "first " + f], [f + f, "<f>5</f>"]),
    ):
        grammar = compiled(compiler, structural_tag={"type": "structural_tag", "format": form})
        assert [text for text in good if not accepts(grammar, text)] == [], form
        assert [text for text in bad if accepts(grammar, text)] == [], form
    ignored = {"type": "array", "uniqueItems": True}
    tag = TAG | {"content": {"type": "json_schema", "json_schema": ignored}}
    with pytest.raises(GrammarError, match="'uniqueItems' is not enforced"):
        compiled(compiler, structural_tag={"type": "structural_tag", "format": tag})
    if name == "llguidance":
        other = {"type": "structural_tag", "format": {"type": "any_text"}}
        with pytest.raises(GrammarError, match="takes the xgrammar backend"):
            compiled(compiler, structural_tag=other)


def test_rollback_takes_tokens_back(either):
    grammar = compiled(either[1], json=CASES[4][0])
    matcher, states = grammar.new_matcher(), []
    for byte in b'{"a":null,"b":[1]}':
        states.append((bytes(matcher.bitmask()), matcher.may_end()))
        assert matcher.accept(byte)
    assert matcher.is_terminated()
    for state in reversed(states):
        matcher.rollback(1)
        assert (bytes(matcher.bitmask()), matcher.may_end()) == state
        assert not matcher.is_terminated()


# --- the JSON-Schema test suite --------------------------------------------------------------

FLOATS_FOR_INTEGERS = "a whole number is not spelled with a fraction"
KNOWN = {
    "format.json": "formats are enforced, not annotations",
    "const.json": FLOATS_FOR_INTEGERS,
    "enum.json": FLOATS_FOR_INTEGERS,
    "type.json": FLOATS_FOR_INTEGERS,
    "ref.json": "keywords beside $ref count in each draft",
}
"""Files of the suite with valid instances that are not admitted, and why. There is no exception
the other way: an invalid instance is never admitted."""


def suite() -> Path:
    """The directory of the suite's drafts, or a skip."""
    found = os.environ.get("JSON_SCHEMA_TEST_SUITE", "")
    if not found:
        pytest.skip("JSON_SCHEMA_TEST_SUITE is not set; see CONTRIBUTING.md")
    return Path(found)


def cases_of(source: Path, draft: str) -> Iterator[tuple[str, Any]]:
    """The test files of a draft, of a directory or of jsonschema's source distribution."""
    if source.is_dir():
        for path in sorted((source / "json" / "tests" / draft).glob("*.json")):
            yield path.name, json.loads(path.read_text(encoding="utf-8"))
        return
    with tarfile.open(source) as archive:
        for member in archive:
            path = Path(member.name)
            if path.parts[1:-1] == ("json", "tests", draft) and path.suffix == ".json":
                file = archive.extractfile(member)
                assert file is not None
                yield path.name, json.load(file)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["draft6", "draft7", "draft2019-09", "draft2020-12"])
def test_the_json_schema_suite(either, draft):
    name, compiler = either
    counts: collections.Counter[str] = collections.Counter()
    for file, cases in cases_of(suite(), draft):
        for case in cases:
            try:
                grammar = compiled(compiler, json=case["schema"])
            except (GrammarError, InvalidRequestError):
                counts["refused"] += 1
                continue
            counts["taken"] += 1
            for test in case["tests"]:
                admitted = admits(grammar, test["data"])
                if test["valid"] and not admitted:
                    assert file in KNOWN, (file, case["description"], test)
                elif admitted:
                    assert test["valid"], (file, case["description"], test)
                counts["instances"] += 1
    assert counts["taken"] > (100 if name == "llguidance" else 30), counts
    assert counts["instances"] > 100, counts


# --- masks -----------------------------------------------------------------------------------

PIECES = (b'{"', b'": ', b'", "', b"true", b' "', b'"}', b"12", b"abc", b", ", b"\n  ", b"\xe4\xbd",
          b"}}", b'"a"', b'\\"', b"\\u", b"null", b"ull", b'":', b"-1", b"yes")  # fmt: skip


def walk(first: GrammarMatcher, second: GrammarMatcher, rng: random.Random, steps: int) -> bytes:
    """Both matchers along a random output; asserts that they agree all along."""
    tokens = [bytes([byte]) for byte in range(256)] + list(PIECES)
    text = b""
    for _ in range(steps):
        allowed = tokens_of(first.bitmask())
        others = tokens_of(second.bitmask())
        # Where one text alone may follow, llguidance allows the tokenizer's first token of it.
        forced = len(allowed) == 1 and allowed <= others
        assert allowed == others or forced, (text, [tokens[i] for i in allowed ^ others])
        assert (first.may_end(), first.is_terminated()) == (
            second.may_end(), second.is_terminated(),
        ), text  # fmt: skip
        if not allowed:
            break
        long = [i for i in sorted(allowed) if tokens[i].strip()] or sorted(allowed)
        token_id = rng.choice(long)
        text += tokens[token_id]
        assert first.accept(token_id)
        assert second.accept(token_id)
    return text


def both_support(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Schemas of what the masks agree on. They differ in what both get right: whitespace within a
    constant, minus zero, a bare DEL and the digits of a number."""
    kinds = ["boolean", "null", "enum", "integer"]
    kinds += ["object", "array", "anyOf", "tuple"] * 2 if depth < 3 else []
    kind = rng.choice(kinds) if depth else "object"
    names = rng.sample(["name", "a", "city", "ok", "Größe"], rng.randint(1, 3))
    match kind:
        case "enum":
            return {"enum": rng.sample(["red", "yes", 3, 12, True, "a", "abc", None], 3)}
        case "integer":
            low = rng.randint(1, 99)
            return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 300)}
        case "object":
            found = {name: both_support(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.6]
            return OBJECT | {"properties": found, "required": required}
        case "array":
            size = {"minItems": rng.randint(0, 1), "maxItems": rng.randint(1, 3)}
            return {"type": kind, "items": both_support(rng, depth + 1)} | size
        case "tuple":
            parts = [both_support(rng, depth + 1) for _ in names]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        case "anyOf":
            return {"anyOf": [both_support(rng, depth + 1), {"type": "null"}]}
    return {"type": kind}


def test_both_backends_make_the_same_masks():
    vocabulary = byte_vocabulary(*PIECES)
    first, second = backend("llguidance", vocabulary), backend("xgrammar", vocabulary)
    asked: list[Any] = [{"choice": ["yes", "yesterday", "no\n"]}]
    asked += [{"json": both_support(random.Random(seed))} for seed in range(60)]
    for number, one in enumerate(asked):
        rng = random.Random(number)
        left, right = compiled(first, **one), compiled(second, **one)
        for _ in range(2):
            walk(left.new_matcher(), right.new_matcher(), rng, 120)


# --- tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tokenizer_kinds.KINDS)
def test_token_bytes_spell_what_the_tokenizer_decodes(kind):
    """Behind another token, each adds these bytes to the text, and special tokens none."""
    tokenizer = tokenizer_kinds.make(tokenizer_kinds.KINDS[kind]())
    found = tokenizer.token_bytes(tokenizer.vocab_size + 3)
    assert found[-3:] == [b""] * 3
    assert all(found[i] == b"" for i in tokenizer.special_token_ids)
    assert sum(map(bool, found)) > 30
    rng = random.Random(3)
    ordinary = [i for i, data in enumerate(found) if data]
    letters = (i for i in ordinary if (tokenizer.backend.id_to_token(i) or "").isalpha())
    anchor = next(letters, ordinary[0])
    before = tokenizer.decode([anchor], skip_special_tokens=False)
    for _ in range(200):
        ids = rng.choices(ordinary, k=rng.randint(1, 8))
        spelled = b"".join(found[i] for i in ids).decode("utf-8", "replace")
        text = tokenizer.decode([anchor, *ids], skip_special_tokens=False)
        if "\ufffd" not in spelled and "\ufffd" not in text:
            assert text == before + spelled, ids


def test_unspellable_token_is_never_allowed(either):
    vocabulary = byte_vocabulary(b"", b"abc", b"")
    grammar = compiled(backend(either[0], vocabulary), structural_tag=STRUCTURES)
    assert tokens_of(grammar.new_matcher().bitmask()) & {256, 257, 258} == {257}


def test_vocabulary_that_cannot_spell_grammar_is_reported(either):
    letters = Vocabulary([b"a", b"b", b""], {}, lambda text: [])
    with pytest.raises(GrammarError, match="admits nothing"):
        compiled(backend(either[0], letters), choice=["yes"])


def test_special_tokens_have_names_in_lark():
    vocabulary = replace(byte_vocabulary(b""), special_tokens={256: "<|call|>"})
    grammar = compiled(backend("llguidance", vocabulary), grammar='start: "a" <|call|> "b"')
    matcher = grammar.new_matcher()
    assert matcher.accept(ord("a"))
    assert tokens_of(matcher.bitmask()) == {256}
    assert matcher.accept(256)
    assert tokens_of(matcher.bitmask()) == {ord("b")}


# --- the model -------------------------------------------------------------------------------


def check_outputs(llm: LLM, seeds: range, max_tokens: int) -> None:
    """Most of the outputs under random schemas are finished, and those are of their schemas."""
    schemas = [random_schema(random.Random(seed)) for seed in seeds]
    streams = [
        llm.stream("x", structured_outputs={"json": schema}, max_tokens=max_tokens, seed=seed)
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    finished = 0
    for schema, stream in zip(schemas, streams, strict=True):
        completion = stream.result()
        if completion.finish_reason == "stop":
            assert_valid(schema, completion.text)
            finished += 1
    assert finished > len(schemas) / 2


@pytest.mark.parametrize("ahead", [False, True])
def test_packaged_model_follows_schemas(ahead):
    with LLM(async_scheduling=ahead) as llm:
        check_outputs(llm, range(8), 100)


@pytest.mark.slow
def test_packaged_model_follows_hundreds_of_schemas():
    with LLM(max_num_seqs=32) as llm:
        check_outputs(llm, range(100, 400), 100)


def test_logit_bias_applies_within_the_grammar():
    with LLM() as llm:
        tokenizer = llm.engine.tokenizer
        [token_id] = tokenizer.encode("b", add_special_tokens=False)[-1:]
        asked = {"regex": "[ab]{5}"}
        found = llm.generate("x", structured_outputs=asked, logit_bias={token_id: 100.0}, seed=1)
        assert found.text == "bbbbb"


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_end|>b"])
def test_a_forced_text_may_spell_a_special_token(text):
    with LLM() as llm:
        found = llm.generate("x", structured_outputs={"choice": [text]}, seed=1)
        assert (found.text, found.finish_reason) == (text, "stop")
