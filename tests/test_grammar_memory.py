"""Memory bounds of compiled grammars, and abandoned compiles."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from asyncllm import (
    AsyncLLMEngine,
    DeadlineExceededError,
    EngineOverloadedError,
    InvalidRequestError,
    SamplingParams,
)
from asyncllm.core import waiting_texts as waiting_texts_module
from asyncllm.core.request import Request
from asyncllm.core.request_grammar import RequestGrammar
from asyncllm.structured import compiler as compiler_module
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.grammar import (
    AUTOMATON_BYTES_PER_SECOND,
    Grammar,
    GrammarMemoryBound,
    Vocabulary,
)
from asyncllm.structured.llguidance_backend import LLGuidanceBackend
from asyncllm.structured.parser_limits import estimate_memory
from asyncllm.structured.spec import StructuredOutputs, parse_structured_outputs
from tests.fakes import thread_of
from tests.idle import blocking_until, until
from tests.slow import slow_but
from tests.structured import ByteRig, byte_vocabulary, tokens_of

LIMIT = compiler_module.MAX_GRAMMAR_BYTES


def spec_of(text: str) -> StructuredOutputs:
    spec = parse_structured_outputs({"regex": text})
    assert spec is not None
    return spec


class Sized:
    """Backends whose grammars take a third of the bound each."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def prepare(self) -> None: ...

    def compile(self, spec: Any, begin: Any) -> Grammar:
        self.begun.append(spec.text)
        assert self.gate.wait(10)
        memory = GrammarMemoryBound(LIMIT // 3)

        def new_matcher() -> Any:
            return memory

        return Grammar(new_matcher, memory=memory)


@pytest.fixture
def sized(monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_COMPILE_THREADS", 1)
    monkeypatch.setattr(compiler_module, "MAX_COOLDOWN_SECONDS", 0.0)
    backends: Any = Sized()
    compiler = GrammarCompiler(backends, 10.0)
    yield backends, compiler
    backends.gate.set()
    for thread in compiler.close():
        thread.join(10)


async def test_cached_grammars_are_bounded_by_their_memory(sized):
    _, compiler = sized
    done = threading.Semaphore(0)
    for name in "abcdef":
        compiler.submit(spec_of(name), lambda grammar, error: done.release(), lambda: True)
    for _ in "abcdef":
        assert done.acquire(timeout=10)
    await until(lambda: len(compiler._memories) == 3)
    assert [name for name in "abcdef" if compiler.find_cached(spec_of(name))] == ["d", "e", "f"]


async def test_a_grammar_in_use_that_grows_drops_cached_ones(sized):
    _, compiler = sized
    used: list[Any] = []
    done = threading.Semaphore(0)
    for name in "abc":

        def keep(grammar: Any, error: Any) -> None:
            used.append(grammar.memory)
            done.release()

        compiler.submit(spec_of(name), keep, lambda: True)
        assert done.acquire(timeout=10)
    memory = used[2]
    del used[:]
    memory.bytes_per_token, memory.max_added_bytes = 2**20, LIMIT // 2
    memory.num_accepted_tokens = LIMIT // 2**20
    memory.record_mask(0.001)  # Below a MiB.
    assert len(compiler._memories) == 3
    num_bytes = compiler_module.MAX_SHARED_AUTOMATON_BYTES
    memory.record_mask(num_bytes / AUTOMATON_BYTES_PER_SECOND - memory.slow_mask_seconds)
    assert [name for name in "abc" if compiler.find_cached(spec_of(name))] == ["c"]
    assert list(compiler._memories) == [memory]
    memory.num_accepted_tokens = num_bytes // compiler_module.SLOW_GROWTH_BYTES_PER_TOKEN * 2
    memory.record_mask(2**20 / AUTOMATON_BYTES_PER_SECOND)
    assert compiler.find_cached(spec_of("c")) is not None
    # Further outputs do not share an automaton that grows fast: they would fail with its outputs.
    memory.record_mask(num_bytes / AUTOMATON_BYTES_PER_SECOND)
    assert compiler.find_cached(spec_of("c")) is None


async def test_a_compile_waits_while_grammars_in_use_take_the_bound(sized):
    backends, compiler = sized
    used: list[Any] = []
    for name in "abcd":
        done = threading.Semaphore(0)

        def keep(grammar: Any, error: Any, done: Any = done) -> None:
            used.append(grammar.new_matcher())
            done.release()

        compiler.submit(spec_of(name), keep, lambda: True)
        assert done.acquire(timeout=10)
    compiler.submit(spec_of("e"), lambda grammar, error: used.append(grammar), lambda: True)
    assert len(used) == 4
    await until(lambda: not compiler._cache)
    assert backends.begun == list("abcd")
    # Another owner has its share of the memory, and no more.
    for name in "fgh":
        compiler.submit(spec_of(name), lambda grammar, _: used.append(grammar), lambda: True, "b")
    await until(lambda: len(used) == 6)
    await asyncio.sleep(0.1)
    assert backends.begun == list("abcdfg")
    del used[:3], used[-2:]
    await until(lambda: len(used) == 3)
    assert sorted(backends.begun) == list("abcdefgh")


async def test_abandoned_compile_does_not_begin(sized):
    backends, compiler = sized
    backends.gate.clear()
    told: list[str] = []
    gone: set[str] = set()
    for name in ("first", "left", "shared", "last"):
        for client in ("x", "y"):
            key = name + client
            compiler.submit(
                spec_of(name),
                lambda grammar, error, key=key: told.append(key),
                lambda key=key: key not in gone,
            )
    await until(lambda: backends.begun == ["first"])
    gone |= {"leftx", "lefty", "sharedx"}
    backends.gate.set()
    await until(lambda: "lasty" in told)
    assert backends.begun == ["first", "shared", "last"]
    assert "leftx" not in told
    assert not compiler._jobs


async def test_unwanted_compiles_keep_no_text_behind_others(sized, monkeypatch):
    backends, compiler = sized
    monkeypatch.setattr(compiler_module, "MAX_UNSWEPT_BYTES", 50_000)
    backends.gate.clear()
    wanted = {"first", "second"}
    for name in ("first", "second", *(f"{i:04d}" + "\U0001f600" * 1000 for i in range(50))):
        compiler.submit(
            spec_of(name), lambda grammar, error: None, lambda name=name: name in wanted
        )
        if name == "first":
            await until(lambda: backends.begun == ["first"])
    assert len(compiler._queue) <= 5
    assert len(compiler._jobs) <= 6
    backends.gate.set()
    await until(lambda: not compiler._jobs)
    assert backends.begun == ["first", "second"]


async def test_texts_of_waiting_grammars_count_in_the_queue(monkeypatch):
    monkeypatch.setattr(waiting_texts_module, "MAX_WAITING_TEXT_BYTES", 500_000)
    async with ByteRig().engine() as engine:
        await engine.pause()
        for prompt in ([1, 2], "a" * 520):
            streams = []
            with pytest.raises(EngineOverloadedError, match="bytes of long texts"):
                for i in range(9):
                    outputs = {"choice": [f"{i:04d}" + "\U0001f600" * 40_000]}
                    streams.append(engine.stream(prompt, structured_outputs=outputs))
            assert len(streams) == 3
            streams.append(engine.stream([1], structured_outputs={"choice": ["a"]}))
            for stream in streams:
                stream.abort()
            await until(lambda: not engine._thread.core.admission.waiting_texts)


async def test_aborted_requests_compile_nothing():
    begun: list[str] = []
    gate = threading.Event()
    async with ByteRig().engine() as engine:
        compiler: Any = thread_of(engine).grammar_compiler
        compile_ = compiler.backends.compile

        def compile_slowly(spec: Any, begin: Any) -> Grammar:
            begun.append(spec.text)
            assert gate.wait(10)
            return compile_(spec, begin)

        compiler.backends.compile = compile_slowly
        streams = [engine.stream("x", structured_outputs={"regex": f"a{i}"}) for i in range(20)]
        await until(lambda: len(begun) == 2)
        for stream in streams[2:]:
            stream.abort()
        gate.set()
        assert [(await stream.result()).text for stream in streams[:2]] == ["a0", "a1"]
        last = await engine.generate("x", structured_outputs={"regex": "last"})
        assert last.text == "last"
        # Two threads compile, so the first two begin in either order.
        assert (sorted(begun[:2]), begun[2:]) == (["a0", "a1"], ["last"])


async def test_a_request_that_has_ended_holds_no_grammar():
    async with ByteRig().engine() as engine:
        compiler = thread_of(engine).grammar_compiler
        stream = engine.stream("x", structured_outputs={"regex": "abc"}, n=2)
        assert [one.text for one in (await stream.result()).outputs] == ["abc", "abc"]
        compiler._cache.clear()
        gc.collect()
        assert not compiler._memories
        assert stream.request_id


# --- requests that have ended ---------------------------------------------------------------


@pytest.fixture
def small_limit(monkeypatch):
    """A limit that two small grammars exceed; the garbage collector is off."""
    monkeypatch.setattr(compiler_module, "MAX_GRAMMAR_BYTES", 3 * 2**19)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ambiguous(letter: str) -> dict[str, str]:
    """A form whose outputs all become too complex after some 20 tokens."""
    return {"grammar": f'root ::= x root | x\nx ::= "{letter}" | "{letter}" x'}


def num_requests() -> int:
    return sum(type(one) is Request for one in gc.get_objects())


async def check_others_compile(engine: AsyncLLMEngine) -> None:
    asked = {"choice": ["other"]}
    assert (await engine.generate("x", structured_outputs=asked, timeout=10)).text == "other"
    compiler = thread_of(engine).grammar_compiler
    compiler._cache.clear()
    async with asyncio.timeout(10):
        # A matcher whose mask is being made is released behind it.
        while compiler._memories:
            await asyncio.sleep(0.001)


async def fail(engine: AsyncLLMEngine, letter: str) -> Any:
    with pytest.raises(InvalidRequestError, match="too complex for the next token") as caught:
        await engine.generate("x", structured_outputs=ambiguous(letter), timeout=5)
    return caught.value


async def expire(engine: AsyncLLMEngine, letter: str) -> Any:
    stream = engine.stream(
        "x", structured_outputs={"regex": letter}, timeout=0.05, min_tokens=1, on_slow="pause"
    )
    await engine.pause()
    with pytest.raises(DeadlineExceededError) as caught:
        await stream.result()
    await engine.resume()
    return caught.value, stream


async def end_slowly(engine: AsyncLLMEngine, letter: str, end: Any) -> Any:
    asked = {"regex": f"{letter}{{1000}}"}
    stream = engine.stream("x", structured_outputs=asked, max_unread=2, on_slow="pause")
    await until(lambda: engine.stats().num_paused == 1)
    end(stream)
    await until(lambda: engine.stats().num_paused == 0)
    return stream


async def abort(engine: AsyncLLMEngine, letter: str) -> Any:
    return await end_slowly(engine, letter, lambda stream: stream.abort())


async def close(engine: AsyncLLMEngine, letter: str) -> Any:
    return await end_slowly(engine, letter, lambda stream: stream.close())


async def finish(engine: AsyncLLMEngine, letter: str) -> Any:
    stream = engine.stream("x", structured_outputs={"regex": letter}, n=2)
    return stream, await stream.result()


@pytest.mark.parametrize("end", [fail, expire, abort, close, finish])
async def test_ended_requests_hold_no_grammar_memory(small_limit, end):
    async with ByteRig(eos=False).engine() as engine:
        kept = [await end(engine, letter) for letter in "abcdef"]
        await check_others_compile(engine)
        assert len(kept) == 6


@pytest.mark.parametrize("ordered", [True, False])
async def test_failed_rows_hold_neither_grammar_memory_nor_prompts(small_limit, ordered):
    def params(letter: str) -> SamplingParams:
        return SamplingParams(structured_outputs=ambiguous(letter))

    before = num_requests()
    async with ByteRig(eos=False).engine() as engine:
        job = engine.map(list("abcdefgh"), sampling_params=params, ordered=ordered, timeout=5)
        kept = [one async for one in job]
        await check_others_compile(engine)
        assert [type(one.error) for one in kept] == [InvalidRequestError] * 8
        first: Any = kept[0].error
        assert "in _accept" in first.__notes__[0]
        assert num_requests() <= before + 1  # The scheduler has those of its latest step.


async def test_errors_keep_the_requests_of_no_other_stream(small_limit):
    async with ByteRig(eos=False).engine() as engine:
        kept = [await fail(engine, letter) for letter in "abc"]
        await check_others_compile(engine)
        scheduler = thread_of(engine).core.scheduler
        for error in kept:
            assert not refers_to(error, scheduler)


def refers_to(error: BaseException, value: object) -> bool:
    """Whether a frame of the error's traceback, or a caller of one, has a value as a variable."""
    tb = error.__traceback__
    while tb is not None:
        frame = tb.tb_frame
        while frame is not None:
            if any(one is value for one in frame.f_locals.values()):
                return True
            frame = frame.f_back
        tb = tb.tb_next
    return False


async def test_request_that_ends_while_it_gets_its_grammar_holds_none(small_limit, monkeypatch):
    streams: list[Any] = []
    numbers = itertools.count()
    begin = RequestGrammar.begin

    def abort_and_begin(grammar: Grammar) -> RequestGrammar:
        number = next(numbers)
        blocking_until(lambda: len(streams) > number)
        streams[number].abort()
        blocking_until(lambda: streams[number]._channel.final is not None)
        return begin(grammar)

    async with ByteRig().engine() as engine:
        monkeypatch.setattr(RequestGrammar, "begin", abort_and_begin)
        for letter in "abc":
            streams.append(engine.stream("x", structured_outputs={"regex": letter}, timeout=5))
            assert (await streams[-1].result()).finish_reason == "abort"
        monkeypatch.setattr(RequestGrammar, "begin", begin)
        await check_others_compile(engine)


async def test_compiles_wait_for_running_requests_alone(small_limit):
    async with ByteRig(eos=False).engine() as engine:

        def submit(text: str, **options: Any) -> Any:
            return engine.stream("x", structured_outputs={"regex": text}, **options)

        holders = [submit(f"{letter}{{1000}}", max_unread=2, on_slow="pause") for letter in "ab"]
        await until(lambda: engine.stats().num_paused == 2)
        late, left, waiting = submit("c", timeout=0.1), submit("d"), submit("e")
        left.abort()
        with pytest.raises(DeadlineExceededError):
            await late.result()
        assert (await left.result()).finish_reason == "abort"
        assert engine.stats().num_waiting == 1
        holders[0].abort()
        assert (await waiting.result()).text == "e"


class FakeMatcher:
    """Matcher that only records whether it was released."""

    is_released = False

    def release(self) -> None:
        self.is_released = True


def test_a_matcher_is_released_once_its_mask_is_made():
    begun, gate = threading.Event(), threading.Event()

    def make_slowly() -> tuple[bytes, float]:
        begun.set()
        assert gate.wait(10)
        return b"", 0.0

    matchers: list[Any] = [FakeMatcher() for _ in range(4)]
    running, queued, done, idle = (RequestGrammar([one].pop) for one in matchers)
    assert [one.matcher for one in (running, queued, done, idle)] == matchers
    with ThreadPoolExecutor(1) as worker:
        done.next_mask = worker.submit(lambda: (b"", 0.0))
        done.next_mask.result()
        running.next_mask = worker.submit(make_slowly)
        assert begun.wait(10)
        queued.next_mask = worker.submit(lambda: (b"", 0.0))
        for one in (running, queued, done, idle):
            one.release()
        assert queued.next_mask.cancelled()
        assert [one.is_released for one in matchers] == [False, True, True, True]
        gate.set()
    assert matchers[0].is_released


# --- what a grammar takes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "a{30000}"},
        {"grammar": "start: /a{30000}/"},
        {"grammar": '%llguidance {"no_forcing": false}\nstart: /a{30000}/'},
        {"json": {"type": "string", "pattern": "^a{30000}$"}},
        {"json": {"const": "a" * 30000}},
        {"choice": ["a" * 30000]},
        {"structural_tag": {"type": "structural_tag",
                            "format": {"type": "const_string", "value": "a" * 30000}}},
    ],
    ids=["regex", "grammar", "option", "pattern", "const", "choice", "tag"],
)  # fmt: skip
def test_a_long_literal_is_not_followed_to_its_end(asked):
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return list(text.encode())

    tokens = [*(bytes([byte]) for byte in range(256)), b"aaaa"]
    spec = parse_structured_outputs(asked)
    assert spec is not None
    backend = LLGuidanceBackend(Vocabulary(tokens, {}, encode))
    texts.clear()
    matcher: Any = backend.compile(spec).new_matcher()
    if "json" in asked:
        assert matcher.accept(ord('"'))
    for _ in range(50):
        assert tokens_of(matcher.bitmask()) == {ord("a"), 256}
        assert matcher.accept(256)
    assert texts == []


def _allocated() -> int:
    class Info(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    found = mallinfo()
    return found.uordblks + found.hblkhd


WORDS = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=130_000)
LONG = "".join(WORDS)


GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-z ]*a[a-z ]{200}x"},
    {"regex": ".*a.{1000}"},
    {"regex": "|".join(f"{c}{c}{{7000}}" for c in "abcdefghijklmnop")},
    {"regex": "(a{100}b){1000}"},
    {"choice": [LONG]},
    {"choice": [LONG[i : i + 28] for i in range(0, 112_000, 28)]},
    {"json": {"const": LONG[:16_000]}},
    {"json": {"enum": [LONG[i : i + 30] for i in range(0, 12_000, 30)]}},
    {"json": {"type": "integer", "multipleOf": 8191}},
    {"json": {"type": "string", "maxLength": 30_000}},
    {"grammar": "start: " + " ".join(f"/{c}{{20000}}/" for c in "abcdefghij" * 20)},
    {"grammar": "start: " + " ".join(f'"{LONG[i : i + 100]}"' for i in range(0, 120_000, 100))},
]


@pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")), reason="glibc's"
)
@pytest.mark.parametrize(
    "asked", slow_but(GRAMMARS, *(GRAMMARS[i] for i in (1, 5, 9, 11))), ids=range(12)
)
def test_grammar_memory_is_within_estimate(asked):
    rng = random.Random(1)
    words = [bytes(rng.choices(range(97, 123), k=2 + i % 6)) for i in range(2000)]
    backend = LLGuidanceBackend(byte_vocabulary(*words))
    spec = parse_structured_outputs(asked)
    assert spec is not None
    gc.collect()
    before = _allocated()
    grammar = backend.compile(spec)
    assert _allocated() - before <= grammar.memory.num_bytes
    for _ in range(10):
        matcher: Any = grammar.new_matcher()
        try:
            for _ in range(200):
                allowed = sorted(tokens_of(matcher.bitmask()))
                if not allowed or not matcher.accept(rng.choice(allowed)):
                    break
        except InvalidRequestError:
            assert grammar.memory.is_exhausted
            break
    assert _allocated() - before <= grammar.memory.num_bytes < LIMIT // 4


def test_memory_is_estimated_from_bytes():
    estimates = set()
    for text in ("a" * 120_000, "\U0001f600" * 30_000):
        spec = parse_structured_outputs({"choice": [text]})
        assert spec is not None
        estimates.add(estimate_memory(spec).compiled_bytes)
    assert len(estimates) == 1


async def test_a_grammar_at_its_limit_of_states_is_compiled_anew():
    async with ByteRig().engine() as engine:
        compiler = thread_of(engine).grammar_compiler
        asked = {"regex": "abc"}
        assert (await engine.generate("x", structured_outputs=asked)).text == "abc"
        first = compiler.find_cached(spec_of("abc"))
        assert first is not None
        assert compiler.find_cached(spec_of("abc")) is first
        first.memory.is_exhausted = True
        assert (await engine.generate("x", structured_outputs=asked)).text == "abc"
        assert compiler.find_cached(spec_of("abc")) not in (first, None)


def test_the_lexers_error_marks_a_grammar_as_exhausted():
    backend = LLGuidanceBackend(byte_vocabulary())
    grammar = backend.compile(spec_of("[ab]*a[ab]{200}x"))
    rng = random.Random(0)
    for _ in range(200):
        matcher = grammar.new_matcher()
        with suppress(InvalidRequestError):
            for _ in range(1000):
                matcher.bitmask()
                assert matcher.accept(rng.choice(b"ab"))
        if grammar.memory.is_exhausted:
            break
    with pytest.raises(InvalidRequestError, match="regex: too complex"):
        grammar.new_matcher().bitmask()
