"""Grammars that begin after a model's thoughts."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm import SamplingParams
from asyncllm.core.reasoning import ReasoningTracker
from asyncllm.core.request_grammar import RequestGrammar
from asyncllm.structured.llguidance_backend import LLGuidanceBackend
from asyncllm.structured.spec import parse_structured_outputs
from asyncllm.structured.xgrammar_backend import XGrammarBackend
from tests.refusals import refused
from tests.structured import byte_vocabulary, tokens_of
from tests.thinking_engine import ASK, ONE, TOOLS, thinking_engine, values

BEGIN = (ord("<"), ord("b"), 300)
END = (301, ord("e"), 302)


class Follower:
    """Masks, the grammar and ReasoningTracker, in the engine's order: the mask, the grammar's own
    advance, then the push as the token is delivered.

    Attributes:
        drops_parser: whether the parser is dropped behind each token, and made again for the mask.
    """

    drops_parser = False

    def __init__(self, backend: Any, *choices: str, **reasoning: Any) -> None:
        vocabulary = byte_vocabulary(*[b""] * 60)
        grammar = backend(vocabulary).compile(parse_structured_outputs({"choice": choices}))
        self.output = RequestGrammar(grammar.new_matcher)
        state: dict[str, Any] = {"is_thinking": False, "may_begin": True, "only_at_start": True}
        self.request: Any = SimpleNamespace(
            request_id="r",
            token_ids=[1],
            min_total_tokens=0,
            stop_token_ids=frozenset({310}),
            sampling=SamplingParams(),
            token_rules=None,
            reasoning=ReasoningTracker(BEGIN, END, **(state | reasoning)),
        )

    def allowed(self) -> set[int]:
        mask = self.output.compute_mask(self.request)
        assert mask is not None
        return tokens_of(mask)

    def take(self, *tokens: int) -> str | None:
        reason = None
        for token in tokens:
            self.request.token_ids.append(token)
            reason = self.output.advance(self.request, token, None)
            self.request.reasoning.push(token)
            if self.drops_parser:
                self.output.drop_parser()
                self.output.compute_mask(self.request)
        return reason


@pytest.fixture(params=itertools.product([LLGuidanceBackend, XGrammarBackend], [False, True]))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    backend, drops_parser = request.param
    monkeypatch.setattr(Follower, "drops_parser", drops_parser)
    return backend


def test_a_delimiter_of_several_tokens_opens_thoughts(backend: Any) -> None:
    follower = Follower(backend, "a", "ab")
    assert follower.allowed() == {ord("a"), BEGIN[0]}
    for before, following in itertools.pairwise(BEGIN):
        follower.take(before)
        assert follower.allowed() == {following}, "the grammar does not begin with it"
    follower.take(BEGIN[2])
    assert follower.request.reasoning.is_thinking
    for token in (ord("a"), ord("z"), *END[:2], 5, *END[:2]):
        follower.take(token)
        assert follower.output.compute_mask(follower.request) == b""
    follower.take(END[2])
    assert follower.allowed() == {ord("a")}
    assert follower.take(ord("a")) is None
    assert follower.allowed() == {ord("b"), 310}
    assert follower.take(ord("b")) == "stop"


def test_a_grammar_that_begins_as_the_delimiter_does(backend: Any) -> None:
    """Both go on together; the matcher goes back if thoughts are opened after all."""
    thinks, answers, parts = (Follower(backend, "<bc", "<z") for _ in range(3))
    for follower in (thinks, answers, parts):
        assert follower.allowed() == {ord("<")}
        follower.take(ord("<"))
        assert follower.allowed() == {ord("b"), ord("z")}
    assert parts.take(ord("z")) == "stop"
    for follower in (thinks, answers):
        follower.take(ord("b"))
        assert follower.allowed() == {ord("c"), 300}
    assert answers.take(ord("c")) == "stop"
    thinks.take(300, 7, *END)
    assert thinks.allowed() == {ord("<")}, "from its beginning, and thoughts come once"
    assert thinks.take(*b"<b") is None
    assert thinks.take(ord("c")) == "stop"


def test_incomplete_delimiter_is_dropped(backend: Any) -> None:
    follower = Follower(backend, "ab")
    follower.take(ord("<"))
    with pytest.raises(Exception, match="token 97 does not follow the grammar"):
        follower.take(ord("a"))


def test_thoughts_do_not_come_back_in_an_answer(backend: Any) -> None:
    follower = Follower(backend, "x<b", "x<bcd")
    follower.take(*b"x<b")
    follower.request.reasoning.push(300)
    assert not follower.request.reasoning.is_thinking
    often = ReasoningTracker(BEGIN, END, is_thinking=False, may_begin=True)
    for token in (5, *BEGIN):
        often.push(token)
    assert often.is_thinking, "without a grammar they do"


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = '{"a": "1 <think> </think>"}'
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("options", "before", "between"),
    [
        ({}, "<think>", "</think>"),
        ({"reasoning_parser": "gpt_oss", "marks": HARMONY}, ANALYSIS, FINAL),
    ],
)
async def test_the_engine_holds_the_answer_and_not_the_thoughts(
    options: Any, before: str, between: str, depth: int
) -> None:
    """n outputs, one of them without thoughts: each has a matcher and a state of its own. The
    fake keeps to its script where the mask lets it."""
    thought = f'Is it {ONE} or "b"?'
    scripts = iter([f"{before}{thought}{between}{JSON}", JSON, f"{before}{between}{JSON}"])
    async with thinking_engine(lambda _: next(scripts), depth=depth, **options) as engine:
        stream = engine.chat(ASK, n=3, structured_outputs={"json": SCHEMA}, temperature=1)
        outputs = (await stream.result()).outputs
    assert [output.reasoning for output in outputs] == [thought, "", ""]
    assert [output.text for output in outputs] == [JSON] * 3
    assert {output.finish_reason for output in outputs} == {"stop"}


@pytest.mark.parametrize("depth", [1, 2])
async def test_call_after_thoughts(depth: int) -> None:
    scripts = iter([f"<think>{ONE}</think>{ONE}", "<think>a</think>No.", "No."])
    async with thinking_engine(lambda _: next(scripts), depth=depth) as engine:
        stream = engine.chat(ASK, tools=TOOLS, tool_choice="required", n=3, max_tokens=300)
        first, second, third = (await stream.result()).outputs
    assert (first.reasoning, first.text) == (ONE, "")
    assert values(first.tool_calls) == [("add", '{"a": 1, "b": 2}')]
    assert second.reasoning == "a"
    for output in (second, third):
        assert "No." not in output.text
        assert output.token_ids[-3:] != tuple(b"No.")
        for call in output.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("restart", ["", "<|start|>assistant"])
async def test_harmonys_thoughts_end_before_a_call_as_well(restart: str) -> None:
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1,"b":2}'
    options = {"reasoning_parser": "gpt_oss", "tool_call_parser": "gpt_oss", "marks": HARMONY}
    scripts = iter([f"{ANALYSIS}Add.<|end|>{restart}{call}", call])
    async with thinking_engine(lambda _: next(scripts), **options) as engine:
        stream = engine.chat(ASK, tools=TOOLS, tool_choice="required", n=2, max_tokens=300)
        outputs = (await stream.result()).outputs
        with refused("response_format", "writes a header"):
            engine.chat(ASK, tools=TOOLS, response_format={"type": "json_object"})
    assert [output.reasoning for output in outputs] == ["Add.", ""]
    assert [values(output.tool_calls) for output in outputs] == [[("add", '{"a":1,"b":2}')]] * 2


async def test_thoughts_without_end_token_are_refused() -> None:
    options = {"chat_template_kwargs": {"enable_thinking": True}}
    async with thinking_engine("Hm.</think>{}", marks=("<x>",)) as engine:
        with refused("structured_outputs", "no token for their end, '</think>'"):
            engine.chat(ASK, structured_outputs={"json_object": True}, **options)
        assert (await engine.chat(ASK, **options).result()).text == "{}"


async def test_reasoning_that_never_ends_under_a_grammar() -> None:
    async with thinking_engine("<think>" + "a" * 400) as engine:
        stream = engine.chat(ASK, structured_outputs={"json": SCHEMA}, max_tokens=50)
        completion = await stream.result()
    assert (completion.text, completion.finish_reason) == ("", "length")
    assert completion.reasoning == "a" * 49
