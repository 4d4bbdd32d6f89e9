"""Structured output in the engine: masks, ends, compiles and errors."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from asyncllm import (
    DeadlineExceededError,
    EngineClosedError,
    InvalidRequestError,
    RequestError,
)
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.grammar import Grammar, GrammarError
from asyncllm.structured.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher
from asyncllm.structured.spec import parse_structured_outputs
from asyncllm.testing.byte_tokenizer import TURN_END
from tests.fakes import core_of, thread_of
from tests.idle import until
from tests.processes import python
from tests.refusals import refused
from tests.structured import (
    ByteRig,
    assert_valid,
    mixed_requests,
    random_schema,
    texts_of,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS: list[tuple[dict[str, Any], Any]] = [
    ({"json": PERSON}, lambda text: assert_valid(PERSON, text)),
    ({"json": json.dumps(PERSON)}, lambda text: assert_valid(PERSON, text)),
    ({"regex": "^[a-z]{3,5}[0-9]$"}, lambda text: re.fullmatch("[a-z]{3,5}[0-9]", text).group()),
    ({"choice": ["yes", 'n"o', "mäh\n"]}, lambda text: ["yes", 'n"o', "mäh\n"].index(text)),
    ({"grammar": 'start: "a" d* "z"\nd: /[0-4]/'}, lambda t: re.fullmatch("a[0-4]*z", t).group()),
    ({"grammar": 'root ::= "a" [0-4]* "z"'}, lambda text: re.fullmatch("a[0-4]*z", text).group()),
    ({"json_object": True}, lambda text: dict(json.loads(text))),
]


@pytest.mark.parametrize("depth", [1, 2])
async def test_an_output_has_the_form_that_it_was_asked_for(depth):
    rig = ByteRig(depth=depth)
    async with rig.engine() as engine:
        for asked, check_text in KINDS:
            outputs = [
                engine.stream(f"prompt {i}", structured_outputs=asked, max_tokens=400)
                for i in range(4)
            ]
            for completion in [await stream.result() for stream in outputs]:
                if asked != {"json_object": True} or completion.finish_reason == "stop":
                    assert completion.finish_reason == "stop", (asked, completion)
                    check_text(completion.text)
                assert completion.stop_reason is None


async def test_depth_preemption_and_lost_steps_change_no_output():
    """A matcher's state is a function of the request's own tokens."""
    expected = await texts_of(ByteRig())
    for one, (text, _, reason) in zip(mixed_requests(12), expected, strict=True):
        if one and reason == "stop":
            assert_valid(json.loads(json.dumps(one["structured_outputs"]["json"])), text)
    assert await texts_of(ByteRig(depth=2)) == expected
    for depth in (1, 2):
        small = ByteRig(depth=depth, num_blocks=33)
        assert await texts_of(small) == expected
        assert any(
            len(a.token_ids) > a.num_prompt_tokens
            for b in small.executor.batches
            for a in b.assignments
        )
        failing = ByteRig(depth=depth)
        failing.executor.faults.update({12 + 3: StepOutOfMemoryError("full")})
        assert await texts_of(failing) == expected


async def test_rows_without_a_grammar_are_not_masked():
    rig = ByteRig(depth=2)
    async with rig.engine() as engine:
        prompt = list(b"free")
        free = engine.stream(prompt, max_tokens=30, ignore_eos=True)
        bound = engine.stream("x", max_tokens=30, structured_outputs={"regex": "[ab]{30}"})
        assert (await free.result()).token_ids == tuple(rig.executor.reference(prompt, 30))
        assert re.fullmatch("[ab]{30}", (await bound.result()).text)
    masked = [batch for batch in rig.executor.batches if batch.masked_rows]
    assert masked
    assert all(len(batch.masked_rows) == 1 for batch in masked)


# --- ends ----------------------------------------------------------------------------------


async def test_request_ends_with_grammar_or_stop_token():
    async with ByteRig().engine() as engine:
        whole = await engine.generate("x", structured_outputs={"choice": ["yes"]}, max_tokens=9)
        assert (whole.token_ids, whole.finish_reason) == (tuple(b"yes"), "stop")
        # The last token that max_tokens allows completes it, which counts first.
        whole = await engine.generate("x", structured_outputs={"choice": ["yes"]}, max_tokens=3)
        assert (whole.text, whole.finish_reason) == ("yes", "stop")
        cut = await engine.generate("x", structured_outputs={"choice": ["yes"]}, max_tokens=2)
        assert (cut.text, cut.finish_reason) == ("ye", "length")
        open_end = {"regex": "[a-e]+"}
        found = await engine.generate("x", structured_outputs=open_end, max_tokens=99)
        assert found.finish_reason == "stop"
        assert found.token_ids[-1] == TURN_END
        assert found.text.encode() == bytes(found.token_ids[:-1])
        on = await engine.generate("x", structured_outputs=open_end, max_tokens=99, ignore_eos=True)
        assert (on.finish_reason, len(on.text)) == ("length", 99)


async def test_stop_tokens_come_only_where_the_grammar_may_end():
    async with ByteRig(eos=False).engine() as engine:
        asked = {"structured_outputs": {"regex": "[ab]{4}c*"}, "stop_token_ids": list(b"ac")}
        found = await engine.generate("x", max_tokens=50, **asked)
        assert (found.text, found.stop_reason in tuple(b"ac")) == ("bbbb", True)
        # Without any, an output that may go on does.
        asked = {"structured_outputs": {"regex": "[ab]{4}c*"}}
        assert (await engine.generate("x", max_tokens=50, **asked)).finish_reason == "length"


async def test_eos_token_named_by_grammar():
    grammar = {"grammar": 'start: "ab" <|im_end|>'}
    within = {"grammar": 'start: "a" <|im_end|> "b"'}
    both = {"grammar": 'start: "a" (<|im_end|> "b")?'}
    async with ByteRig(depth=2).engine() as engine:
        for asked, options, expected in (
            (grammar, {}, ("ab", (*b"ab", TURN_END), "stop")),
            (grammar, {"ignore_eos": True}, ("ab", (*b"ab", TURN_END), "stop")),
            (grammar, {"min_tokens": 3}, ("ab", (*b"ab", TURN_END), "stop")),
            (within, {}, ("ab", (97, TURN_END, 98), "stop")),
            (within, {"stop_token_ids": [TURN_END]}, ("ab", (97, TURN_END, 98), "stop")),
            (within, {"max_tokens": 2}, ("a", (97, TURN_END), "length")),
            (both, {}, ("a", (97, TURN_END), "stop")),  # the grammar may end there
        ):
            found = await engine.generate("x", structured_outputs=asked, **options)
            assert (found.text, found.token_ids, found.finish_reason) == expected, (asked, options)
            assert found.stop_reason is None
        # Without its name, it ends where the grammar may, and not before.
        found = await engine.generate("x", structured_outputs={"grammar": 'start: "ab" "c"*'})
        assert found.token_ids[-1] == TURN_END


async def test_min_tokens_bans_stop_tokens_but_not_grammar_end():
    async with ByteRig().engine() as engine:
        asked = {"min_tokens": 40, "max_tokens": 90}
        found = await engine.generate("x", structured_outputs={"regex": "[a-e]+"}, **asked)
        assert len(found.token_ids) >= 40
        found = await engine.generate("x", structured_outputs={"choice": ["no"]}, **asked)
        assert (found.text, found.finish_reason) == ("no", "stop")


async def test_a_stop_string_ends_it_in_the_middle():
    async with ByteRig().engine() as engine:
        asked = {"structured_outputs": {"choice": ["abcdef"]}, "stop": "cd"}
        found = await engine.generate("x", **asked)
        assert (found.text, found.finish_reason, found.stop_reason) == ("ab", "stop", "cd")
        found = await engine.generate("x", structured_outputs={"choice": ["abc"]}, stop="c")
        assert (found.text, found.stop_reason) == ("ab", "c")


async def test_allowed_tokens_and_the_grammar_both_count():
    async with ByteRig().engine() as engine:
        asked = {"structured_outputs": {"regex": "[a-e]{20}"}, "allowed_token_ids": list(b"bd")}
        assert set((await engine.generate("x", **asked)).text) == {"b", "d"}
        # What may go on by the grammar and may not by them ends, where it may.
        for rule in ({"allowed_token_ids": list(b"ab")}, {"bad_words": [*"0123456789"]}):
            found = await engine.generate("x", structured_outputs={"regex": "ab[0-9]*"}, **rule)
            assert (found.text, found.finish_reason) == ("ab", "stop")


async def test_empty_mask_is_an_error_of_its_request():
    rig = ByteRig(depth=2)
    async with rig.engine() as engine:
        asked = {"structured_outputs": {"regex": "ab[0-9]"}, "allowed_token_ids": list(b"ab")}
        stuck = engine.stream("x", **asked)
        neighbour = engine.stream("y", structured_outputs={"regex": "[ab]{20}"})
        with pytest.raises(RequestError, match="no token may follow 3 tokens under the grammar"):
            await stuck.result()
        assert len((await neighbour.result()).text) == 20
        assert engine.stats().num_free_blocks == rig.info.num_blocks - 1


class _Broken(LLGuidanceMatcher):
    """Fails in one method, after two tokens."""

    where = ""

    def _fail(self, where: str) -> None:
        if self.where == where and self._matcher.compute_ff_bytes() == b"c":
            raise KeyError(where) if where != "bitmask" else BaseException(where)

    def accept(self, token_id: int) -> bool:
        self._fail("accept")
        if self.where == "refuse":
            return False
        return super().accept(token_id)

    def bitmask(self) -> bytearray:
        self._fail("bitmask")
        return super().bitmask()


@pytest.mark.parametrize("where", ["accept", "bitmask", "refuse", "new_matcher"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_matcher_that_fails_ends_its_own_request(where, depth, monkeypatch):
    compile_, count = LLGuidanceBackend.compile, itertools.count()
    monkeypatch.setattr(_Broken, "__slots__", (), raising=False)

    def compile_broken(self: Any, spec: Any) -> Any:
        grammar = compile_(self, spec)

        def new_matcher() -> Any:
            if next(count) and where == "new_matcher":  # the first is the compiler's own
                raise BaseException("new_matcher")
            inner: Any = grammar.new_matcher()
            found = _Broken(inner._matcher, inner._vocabulary, inner._spec, grammar.memory)
            found.where = where
            return found

        return replace(grammar, new_matcher=new_matcher) if spec.text == "abc" else grammar

    monkeypatch.setattr(LLGuidanceBackend, "compile", compile_broken)
    async with ByteRig(depth=depth).engine() as engine:
        broken = engine.stream("x", structured_outputs={"regex": "abc"})
        neighbour = engine.stream("y", structured_outputs={"regex": "[ab]{20}"})
        with pytest.raises(RequestError):
            await broken.result()
        assert len((await neighbour.result()).text) == 20
        assert engine.stats().num_failed == 1


async def test_aborts_keep_masks_in_their_rows():
    rig = ByteRig(depth=2)
    async with rig.engine() as engine:
        streams = [
            engine.stream(f"p{i}", structured_outputs={"regex": f"[{c}]{{30}}"})
            for i, c in enumerate("abcdefgh")
        ]
        for i in (1, 4):
            await anext(streams[i])
            streams[i].abort()
        for i, c in enumerate("abcdefgh"):
            text = (await streams[i].result()).text
            assert text == c * len(text)
            assert len(text) == 30 or i in (1, 4)


# --- compiles --------------------------------------------------------------------------------


class Slow:
    """Holds compiles of expressions that begin with "slow" until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.begun: list[str] = []
        compile_ = LLGuidanceBackend.compile

        def compile_slowly(backend: Any, spec: Any) -> Any:
            self.begun.append(spec.text)
            if spec.text.startswith("slow"):
                self.gate.wait(20)
            return compile_(backend, spec)

        monkeypatch.setattr(LLGuidanceBackend, "compile", compile_slowly)


@pytest.fixture
def slow(monkeypatch):
    found = Slow(monkeypatch)
    yield found
    found.gate.set()


async def test_a_compile_holds_up_nothing_but_its_requests(slow):
    async with ByteRig().engine() as engine:
        held = [engine.stream("x", structured_outputs={"regex": "slow"}) for _ in range(3)]
        assert (await engine.generate("y", max_tokens=5)).finish_reason
        found = await engine.generate("y", structured_outputs={"regex": "quick"})
        assert found.text == "quick"
        assert engine.stats().num_waiting == 3
        slow.gate.set()
        assert [(await stream.result()).text for stream in held] == ["slow"] * 3
        await engine.generate("x", structured_outputs={"regex": "slow"})
        assert slow.begun.count("slow") == 1  # compiled once, for all, and kept


class Timed:
    """Backends whose compiles take 40 ms; their beginnings and ends by thread."""

    def __init__(self) -> None:
        self.spans: dict[int, list[tuple[float, float]]] = {}

    def prepare(self) -> None: ...

    def compile(self, spec: Any, begin: Any) -> Any:
        began = time.perf_counter()
        time.sleep(0.04)
        span = began, time.perf_counter()
        self.spans.setdefault(threading.get_ident(), []).append(span)
        return Grammar(lambda: None)  # pyright: ignore[reportArgumentType]


def test_compiler_thread_idles_until_close() -> None:
    backends: Any = Timed()
    compiler, done = GrammarCompiler(backends, 10.0), threading.Semaphore(0)
    for i in range(4):
        spec = parse_structured_outputs({"regex": str(i)})
        assert spec is not None
        compiler.submit(spec, lambda grammar, error: done.release(), lambda: True)
    for _ in range(4):
        assert done.acquire(timeout=10)
    began = time.perf_counter()
    for thread in compiler.close():
        thread.join(10)
    assert time.perf_counter() - began < 0.07  # a rest takes 80 ms
    pairs = [pair for spans in backends.spans.values() for pair in itertools.pairwise(spans)]
    assert len(pairs) >= 2
    assert min(after[0] - before[1] for before, after in pairs) >= 0.08


class Niceness:
    """Backend that notes the niceness of its thread."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def prepare(self) -> None: ...

    def compile(self, spec: Any, begin: Any) -> Any:
        self.found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        raise GrammarError("none")


@pytest.mark.skipif(sys.platform != "linux", reason="niceness of a thread")
def test_only_compile_threads_have_low_priority() -> None:
    backends: Any = Niceness()
    compiler, done = GrammarCompiler(backends, 10.0), threading.Event()
    spec = parse_structured_outputs({"regex": "x"})
    assert spec is not None
    before = os.getpriority(os.PRIO_PROCESS, 0)
    compiler.submit(spec, lambda grammar, error: done.set(), lambda: True)
    assert done.wait(10)
    assert backends.found == [min(before + 5, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    compiler.close()


AT_EXIT = """
import os, sys, threading, time
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.spec import parse_structured_outputs

class Slow:
    def prepare(self): ...
    def compile(self, spec, begin):
        begun.release()
        time.sleep({seconds})
        os.write(1, b"compiled " + spec.text.encode())

begun = threading.Semaphore(0)
compiler = GrammarCompiler(Slow(), timeout={timeout})
for text in "abc":
    spec = parse_structured_outputs({{"regex": text}})
    compiler.submit(spec, lambda *result: None, lambda: True)
begun.acquire()
begun.acquire()
if {closed}:
    compiler.close()
sys.exit(7)
"""


@pytest.mark.parametrize("closed", [False, True])
def test_interpreter_exit_waits_for_running_compiles(closed: bool) -> None:
    """A library that returns from a compile after that may abort the process."""
    ran = python("-c", AT_EXIT.format(seconds=0.5, timeout=30, closed=closed), timeout=60)
    assert (ran.returncode, ran.stderr) == (7, "")
    assert sorted(re.findall("compiled [abc]", ran.stdout)) == ["compiled a", "compiled b"]


def test_interpreter_exit_waits_at_most_the_compile_limit() -> None:
    began = time.monotonic()
    ran = python("-c", AT_EXIT.format(seconds=600, timeout=0.2, closed=False), timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "", "")
    assert time.monotonic() - began < 30


async def test_timed_out_compile_fails_requests_and_is_kept(slow):
    async with ByteRig().engine(grammar_timeout=0.2) as engine:
        held = [engine.stream("x", structured_outputs={"regex": "slow"}) for _ in range(2)]
        raised = []
        for stream in held:
            with pytest.raises(
                InvalidRequestError, match=r"within grammar_timeout=0\.2 s"
            ) as caught:
                await stream.result()
            assert caught.value.param == "structured_outputs"
            raised.append(caught.value)
        assert raised[0] is not raised[1]
        assert (await engine.generate("y", structured_outputs={"regex": "quick"})).text == "quick"
        slow.gate.set()
        while (
            thread_of(engine).grammar_compiler.find_cached(
                parse_structured_outputs({"regex": "slow"})
            )
            is None
        ):
            await asyncio.sleep(0.01)
        assert (await engine.generate("x", structured_outputs={"regex": "slow"})).text == "slow"


async def test_compiles_past_their_time_are_bounded(slow):
    async with ByteRig().engine(grammar_timeout=0.1) as engine:
        for i in range(3):
            with pytest.raises(InvalidRequestError, match="grammar_timeout"):
                await engine.generate("x", structured_outputs={"regex": f"slow{i}"})
        with pytest.raises(RequestError, match="3 grammars that took longer"):
            await engine.generate("x", structured_outputs={"regex": "slow9"})
        assert (await engine.generate("y", max_tokens=5)).finish_reason
        assert "slow9" not in slow.begun
        slow.gate.set()


async def test_three_threads_at_most_compile(slow):
    async with ByteRig().engine(grammar_timeout=0.3) as engine:
        asked = [{"regex": f"slow{i}"} for i in range(5)]
        streams = [engine.stream("x", structured_outputs=one) for one in asked]
        messages = []
        for stream in streams:
            with pytest.raises(RequestError) as caught:
                await stream.result()
            messages.append(str(caught.value))
        assert sum("was not compiled within grammar_timeout" in one for one in messages) == 3
        assert sum("3 grammars that took longer" in one for one in messages) == 2
        assert len(slow.begun) == 3
        slow.gate.set()


async def test_request_waiting_for_grammar_can_abort_or_expire(slow):
    async with ByteRig().engine() as engine:
        aborted = engine.stream("x", structured_outputs={"regex": "slow"})
        aborted.abort()
        assert (await aborted.result()).finish_reason == "abort"
        with pytest.raises(DeadlineExceededError, match="while being tokenised"):
            await engine.generate("x", structured_outputs={"regex": "slow2"}, timeout=0.05)
        slow.gate.set()
        assert (await engine.generate("y", max_tokens=5)).finish_reason
        assert engine.stats().num_waiting == 0


async def test_closing_does_not_wait_for_a_compile(slow):
    """It is left on a daemon thread, and touches nothing of the engine when it is done."""
    rig = ByteRig()
    engine = rig.engine()
    await engine.start()
    stream = engine.stream("x", structured_outputs={"regex": "slow"})
    queued = [engine.stream("x", structured_outputs={"regex": f"slow{i}"}) for i in range(3)]
    await until(lambda: slow.begun)
    await engine.aclose()
    assert not slow.gate.is_set()
    for one in (stream, *queued):
        assert (await one.result()).finish_reason == "abort"
    with pytest.raises(EngineClosedError):
        engine.stream("x")
    left = [one for one in threading.enumerate() if one.name == "asyncllm-grammar"]
    assert left
    assert all(one.daemon for one in left)
    sent: list[Any] = []
    core_of(engine).send = lambda *command: sent.append(command)
    slow.gate.set()
    for one in left:
        await asyncio.to_thread(one.join, 10)
        assert not one.is_alive()
    assert sent == []
    assert (
        thread_of(engine).grammar_compiler.find_cached(parse_structured_outputs({"regex": "slow"}))
        is None
    )


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"json": {"type": "foo"}}, "foo"),
        ({"json": {"type": "object", "uniqueItems": True}}, "'uniqueItems' is not enforced"),
        ({"json": {"minlength": 3}}, "'minlength' is not enforced"),
        ({"json": {"x-guidance": {"lenient": True}}}, "'x-guidance' is not enforced"),
        ({"json": False}, "not"),
        ({"json": {"$ref": "#"}}, "never end"),
        (
            {
                "json": {
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                    "$ref": "#/$defs/a",
                }
            },
            "never end",
        ),
        ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json": {"enum": []}}, "empty"),
        ({"regex": "("}, "regex"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "^$"}, "admits no output but the empty one"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": "("}, "by llguidance"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "odd"}}}, "odd"),
    ],
    ids=str,
)
async def test_a_bad_grammar_is_an_error_of_its_request(asked, says):
    async with ByteRig().engine(structured_outputs_backend="llguidance") as engine:
        bad = engine.stream("x", structured_outputs=asked)
        good = engine.stream("y", structured_outputs={"choice": ["yes"]})
        with refused("structured_outputs", says):
            await bad.result()
        assert (await good.result()).text == "yes"


@pytest.mark.parametrize(
    ("backend", "extra"),
    [("auto", "structured"), ("llguidance", "structured"), ("xgrammar", "xgrammar")],
)
async def test_a_missing_backend_names_its_extra(backend, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    says = rf"is not installed, expected `pip install asyncllm\[{extra}\]`"
    engine = ByteRig().engine(structured_outputs_backend=backend)
    if backend != "auto":
        with pytest.raises(InvalidRequestError, match=says):
            await engine.start()
        return
    async with engine:
        with refused("structured_outputs", says):
            engine.stream("x", structured_outputs={"regex": "a"})
        assert (await engine.generate("x", max_tokens=3)).finish_reason


async def test_a_device_that_drafts_refuses_grammars():
    rig = ByteRig()
    object.__setattr__(rig.executor.info, "max_tokens_per_row", 3)
    async with rig.engine() as engine:
        with pytest.raises(InvalidRequestError, match="drafts tokens"):
            engine.stream("x", structured_outputs={"regex": "a"})


@pytest.mark.slow
async def test_fuzzed_grammars_leave_the_engine_as_it_was():
    rng = random.Random(11)
    pieces = ["a", "b", "(", ")", "*", "+", "?", "|", "[", "]", "{2,900}", "{1,3}", "\\", "^", ".",
              "\\p{L}", "&", "~", "é", "(?i)", "\\x{10ffff}", "\\d", "$"]  # fmt: skip
    regexes = ["".join(rng.choices(pieces, k=rng.randint(1, 40))) for _ in range(250)]
    regexes += ["(a{1000}){1000}", "(a|a)*" * 200 + "b", "((a*)*)*" * 50, "(" * 4000 + ")" * 4000]
    regexes += [".{0,1000}x.{0,1000}" * 20, "(a?){500}a{500}", "[^" + "a" * 8000 + "]"]
    grammars = ["start: " + "(" * 50_000, "start: start", "start: start start | ", "root ::= root"]
    grammars += ["start: " + "a " * 9999 + '\na: "x"?', 'start: "x"{1,99999999}', "\0", "%json {"]
    schemas: list[Any] = [random_schema(rng) for _ in range(60)]
    for schema in schemas[30:]:
        text = list(json.dumps(schema))
        for _ in range(3):
            text[rng.randrange(len(text))] = rng.choice('{}[]":,0x')
        schemas.append("".join(text))
    schemas += [{"type": "string", "pattern": one} for one in regexes[:60]]
    schemas += [{"maxLength": 10**9}, {"type": "array", "maxItems": 10**6, "minItems": 10**6}]
    schemas += [{"anyOf": [{"const": i} for i in range(9000)]}, {"enum": list(range(9000))}]
    asked = [{"regex": one} for one in regexes] + [{"grammar": one} for one in grammars]
    asked += [{"json": one} for one in schemas]
    refused = set()
    async with ByteRig().engine(grammar_timeout=5) as engine:
        plain = (await engine.generate("z", max_tokens=20, ignore_eos=True)).token_ids
        for begin in range(0, len(asked), 12):
            streams = []
            for one in asked[begin : begin + 12]:
                try:
                    streams.append(engine.stream("x", max_tokens=20, structured_outputs=one))
                except InvalidRequestError as error:
                    refused.add(error.param)
            neighbour = engine.stream("z", max_tokens=20, ignore_eos=True)
            for stream in streams:
                with contextlib.suppress(RequestError):
                    await stream.result()
            assert (await neighbour.result()).token_ids == plain
        assert engine.state == "running"
        assert refused == {"structured_outputs"}
    for one in threading.enumerate():
        if one.name == "asyncllm-grammar":  # of a compile past its time, which nothing ends
            await asyncio.to_thread(one.join, 60)
