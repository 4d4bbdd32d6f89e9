"""Systems that start no further thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from asyncllm import EngineError, RequestError
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.grammar import Grammar
from asyncllm.structured.spec import parse_structured_outputs
from tests.fakes import fake
from tests.model_load import load, reading_thread
from tests.structured import ByteRig

LOOP = pytest.mark.asyncio(loop_factories=["asyncio"])
NONE_LEFT = "can't start new thread"


@contextmanager
def no_thread(*names: str) -> Iterator[None]:
    """No thread of these names starts, as where a container may have no more of them."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in names:
            raise RuntimeError(NONE_LEFT)
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


@pytest.fixture
def one_compile(monkeypatch):
    """One at a time, so that the second waits or has a thread of its own."""
    monkeypatch.setattr("asyncllm.structured.compiler.MAX_COMPILE_THREADS", 1)


@LOOP
async def test_start_says_that_no_thread_starts():
    engine = fake().engine()
    with no_thread("asyncllm-engine"), pytest.raises(EngineError, match=NONE_LEFT):
        await engine.start()
    assert engine.state == "new"
    async with engine:
        assert (await engine.generate("1 2", max_tokens=2)).token_ids


def test_an_interrupted_start_leaves_no_engine(monkeypatch):
    """Ctrl-C may come while ``Thread.start`` waits for the thread that it has begun."""
    start, loaded = threading.Thread.start, threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "asyncllm-engine":
            raise KeyboardInterrupt

    rig = fake()
    rig.load_gate = loaded
    engine = rig.engine()
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine._start_blocking()
    assert engine.state == "new"
    loaded.set()  # the thread ends: the fixture of all tests waits for that


def test_tokenizer_is_read_after_weights_without_thread():
    with no_thread("asyncllm-tokenizer-load"):
        loaded = load()
    try:
        assert loaded.tokenizer.vocab_size == loaded.model_config.vocab_size
        assert reading_thread() is None
    finally:
        loaded.executor.close()


@LOOP
async def test_a_long_text_without_a_thread_fails_alone():
    async with fake(num_blocks=2000).engine() as engine:
        with no_thread("asyncllm-text"):
            long = engine.stream("1 " * 3000, max_tokens=2)
            with pytest.raises(RequestError, match=f"needs a thread.*{NONE_LEFT}"):
                await long.result()
            assert (await engine.generate("1 2", max_tokens=2)).token_ids
        stats = engine.stats()
        assert (stats.num_waiting, stats.num_failed) == (0, 1)
        assert (await engine.generate("1 " * 3000, max_tokens=2)).token_ids


@LOOP
async def test_a_grammar_without_a_thread_fails_alone():
    async with ByteRig().engine() as engine:
        with no_thread("asyncllm-grammar"):
            for _ in range(2):
                with pytest.raises(RequestError, match=f"needs a thread.*{NONE_LEFT}"):
                    await engine.generate("x", structured_outputs={"regex": "a"})
            assert (await engine.generate("y", max_tokens=2)).token_ids
        assert (await engine.generate("x", structured_outputs={"regex": "a"})).text == "a"


class SlowBackends:
    """The grammar "slow" waits; all others are compiled at once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()

    def prepare(self) -> None:
        pass

    def compile(self, spec, begin) -> Grammar:
        if spec.text == "slow":
            begin()
            self.begun.set()
            assert self.gate.wait(10)
        return Grammar(lambda: None)  # pyright: ignore[reportArgumentType, reportReturnType]


def submit(compiler: GrammarCompiler, regex: str) -> Future[Exception | None]:
    told: Future[Exception | None] = Future()
    spec = parse_structured_outputs({"regex": regex})
    assert spec is not None
    compiler.submit(spec, lambda grammar, error: told.set_result(error), lambda: True)
    return told


def test_a_grammar_takes_the_thread_of_another():
    backends = SlowBackends()
    compiler = GrammarCompiler(backends, 10.0)  # pyright: ignore[reportArgumentType]
    slow = submit(compiler, "slow")
    assert backends.begun.wait(10)
    with no_thread("asyncllm-grammar"):
        quick = submit(compiler, "quick")
    backends.gate.set()
    assert slow.result(10) is None
    assert quick.result(10) is None
    for thread in compiler.close():
        thread.join(10)


def test_grammars_behind_a_timed_out_compile_fail(one_compile):
    backends = SlowBackends()
    compiler = GrammarCompiler(backends, 0.05)  # pyright: ignore[reportArgumentType]
    slow = submit(compiler, "slow")
    assert backends.begun.wait(10)
    with no_thread("asyncllm-grammar"):
        queued = [submit(compiler, f"quick{i}") for i in range(2)]
        assert "grammar_timeout" in str(slow.result(10))
        for one in queued:
            assert NONE_LEFT in str(one.result(10))
    assert submit(compiler, "quick0").result(10) is None
    backends.gate.set()
    for thread in compiler.close():
        thread.join(10)


def test_an_engine_does_not_start_while_the_interpreter_exits():
    """Other threads do not run any more, and the start of one would wait for it for good."""
    program = """
from asyncllm import LLM, EngineError

class Late:
    def __del__(self, LLM=LLM, EngineError=EngineError, print=print):
        try:
            LLM()
        except EngineError as error:
            print(error)

late = Late()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout == "the engine could not start: the interpreter is exiting\n", ran.stderr
