"""Turns of owners in the queue of grammar compilations."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm.structured import compiler as compiler_module
from asyncllm.structured.compiler import (
    BYTES_PER_QUEUED_REQUEST,
    MAX_UNSWEPT_BYTES,
    GrammarCompiler,
    _CompileJob,
)
from asyncllm.structured.grammar import Grammar, GrammarError
from asyncllm.structured.spec import StructuredOutputs
from tests.fakes import thread_of
from tests.idle import blocking_until, until
from tests.structured import ByteRig


class GatedBackends:
    """Backends that compile nothing before their gate opens.

    Attributes:
        errors: errors of the grammars that are not compiled, by text.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = threading.Event()
        self.errors: dict[str, Exception] = {}

    def prepare(self) -> None: ...

    def compile(self, spec: StructuredOutputs, begin: Any) -> Grammar:
        self.begun.append(spec.text)
        begin()
        assert self.gate.wait(10)
        if spec.text in self.errors:
            raise self.errors[spec.text]
        return Grammar(lambda: None)  # pyright: ignore[reportArgumentType, reportReturnType]


class Rig:
    """A compiler, what it has told its requests, and which requests are gone.

    Attributes:
        told: ``(name, error)`` of each call of a request's callback.
        gone: names of the requests that do not wait any more.
        num_checks: number of questions whether a request still waits.
    """

    def __init__(self) -> None:
        self.backends = GatedBackends()
        self.compiler = GrammarCompiler(self.backends, 10.0)  # pyright: ignore[reportArgumentType]
        self.told: list[tuple[str, Exception | None]] = []
        self.gone: set[str] = set()
        self.num_checks = 0

    def submit(self, owner: str, *names: str) -> None:
        """Queue requests. ``text`` and ``text/client`` are requests for the same grammar."""
        for name in names:

            def is_wanted(name: str = name) -> bool:
                self.num_checks += 1
                return name not in self.gone

            self.compiler.submit(
                StructuredOutputs("regex", name.split("/")[0]),
                lambda grammar, error, name=name: self.told.append((name, error)),
                is_wanted,
                owner,
            )

    def hold_first(self) -> None:
        """Occupy the only thread, so that all other requests are queued."""
        self.submit("first", "first")
        blocking_until(lambda: self.backends.begun == ["first"])

    def begun_after_first(self) -> list[str]:
        """Let all compilations run; returns their order without the first."""
        self.backends.gate.set()
        blocking_until(lambda: not self.compiler._threads)
        return self.backends.begun[1:]

    def close(self) -> None:
        self.backends.gate.set()
        for thread in self.compiler.close():
            thread.join(10)
        queue = self.compiler._queue
        assert (queue._lines, queue._num_running, self.compiler._num_queued_bytes) == ({}, {}, 0)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(compiler_module, "MAX_COMPILE_THREADS", 1)
    monkeypatch.setattr(compiler_module, "MAX_COOLDOWN_SECONDS", 0.0)
    rig = Rig()
    yield rig
    rig.close()


def test_owners_compile_in_turns(rig: Rig) -> None:
    rig.hold_first()
    crowd = [f"a{i}" for i in range(100)]
    rig.submit("a", *crowd)
    rig.submit("b", "b0", "b1", "b2")
    rig.submit("c", "c0")
    expected = ["a0", "b0", "c0", "a1", "b1", "a2", "b2", *crowd[3:]]
    assert rig.begun_after_first() == expected
    assert rig.told == [(name, None) for name in ["first", *expected]]


def test_a_shared_compile_begins_at_the_first_turn_of_its_owners(rig: Rig) -> None:
    rig.hold_first()
    rig.submit("a", "a0", "a1", "shared/a")
    rig.submit("b", "shared/b", "b1")
    assert rig.begun_after_first() == ["a0", "shared", "a1", "b1"]
    assert [name for name, _ in rig.told][2:4] == ["shared/a", "shared/b"]


def test_a_shared_compile_takes_the_turn_of_one_owner(rig: Rig) -> None:
    rig.hold_first()
    rig.submit("a", "shared/a")
    rig.submit("b", "shared/b", "b1")
    rig.submit("a", "a1")
    assert rig.begun_after_first() == ["shared", "b1", "a1"]


def test_dropped_compiles_take_no_turn(rig: Rig) -> None:
    rig.hold_first()
    rig.submit("a", "a0", "left/1", "left/2", "a1")
    rig.submit("b", "b0", "b1", "b2")
    rig.gone |= {"left/1", "left/2"}
    assert rig.begun_after_first() == ["a0", "b0", "a1", "b1", "b2"]


def test_a_request_that_left_keeps_no_place_for_a_later_one(rig: Rig) -> None:
    rig.hold_first()
    rig.submit("a", "shared/left", "a1", "shared/a")
    rig.submit("b", "shared/gone")
    rig.gone |= {"shared/left", "shared/gone"}
    assert rig.begun_after_first() == ["a1", "shared"]
    assert rig.told == [("first", None), ("a1", None), ("shared/a", None)]


def test_a_request_joins_a_compile_that_has_begun(rig: Rig) -> None:
    rig.hold_first()
    rig.submit("a", "first/a", "a0")
    assert len(rig.compiler._queue) == 1
    assert rig.begun_after_first() == ["a0"]
    assert rig.told == [("first", None), ("first/a", None), ("a0", None)]


def test_unwanted_texts_are_dropped_from_all_lines(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_UNSWEPT_BYTES", 50_000)
    rig.hold_first()
    for i in range(20):
        for owner in "ab":
            name = f"{owner}{i:02d}" + "x" * 4000
            rig.submit(owner, name)
            if i != 7:
                rig.gone.add(name)
    assert len(rig.compiler._queue) <= 6
    assert len(rig.compiler._jobs) <= 7
    texts = [request.job.spec.text for request in rig.compiler._queue]
    num_bytes = sum(sys.getsizeof(text) + BYTES_PER_QUEUED_REQUEST for text in texts)
    assert rig.compiler._num_queued_bytes == num_bytes
    gc.collect()
    assert sum(type(one) is _CompileJob for one in gc.get_objects()) == len(rig.compiler._jobs)
    assert [name[:3] for name in rig.begun_after_first()] == ["a07", "b07"]


def test_gone_requests_for_one_short_text_do_not_pile_up(rig: Rig) -> None:
    rig.hold_first()
    rig.submit("a", "text/0")
    num_requests = 4 * MAX_UNSWEPT_BYTES // BYTES_PER_QUEUED_REQUEST
    for i in range(1, num_requests):
        name = f"text/{i}"
        rig.submit("ab"[i % 2], name)
        rig.gone.add(name)
    assert len(rig.compiler._queue) <= MAX_UNSWEPT_BYTES // BYTES_PER_QUEUED_REQUEST
    assert rig.num_checks < 2 * num_requests
    assert rig.begun_after_first() == ["text"]
    assert rig.told[:2] == [("first", None), ("text/0", None)]


def test_wanted_requests_are_not_checked_at_each_new_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_UNSWEPT_BYTES", 4 * BYTES_PER_QUEUED_REQUEST)
    rig.hold_first()
    rig.num_checks = 0
    for i in range(500):
        rig.submit("a", f"text{i}")
    assert 500 < rig.num_checks < 2 * 500
    assert len(rig.compiler._queue) == 500


def test_the_bound_on_gone_requests_falls_with_the_queue(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_UNSWEPT_BYTES", 4 * BYTES_PER_QUEUED_REQUEST)
    rig.hold_first()
    wanted = [f"wanted{i}" for i in range(40)]
    rig.submit("a", *wanted)
    assert len(rig.compiler._queue) == 40
    for name in wanted:
        rig.compiler._drop_job(rig.compiler._jobs[StructuredOutputs("regex", name)])
    for i in range(40):
        rig.submit("a", f"gone{i}")
        rig.gone.add(f"gone{i}")
    assert len(rig.compiler._queue) <= 5


def test_work_per_request_does_not_grow_with_the_queue(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def getsizeof(text: str) -> int:
        sizes.append(sys.getsizeof(text))
        return sizes[-1]

    monkeypatch.setattr(compiler_module, "sys", SimpleNamespace(getsizeof=getsizeof))
    rig.hold_first()
    rig.num_checks = 0
    sizes.clear()
    for i in range(500):
        rig.submit(f"owner{i % 7}", f"text{i}")
    assert (rig.num_checks, len(sizes)) == (0, 500)
    assert len(rig.begun_after_first()) == 500
    # A request is asked when a thread looks for the next one, and dropped or begun then.
    assert (rig.num_checks, len(sizes)) == (500, 1000)


def test_close_drops_the_queued_compiles_of_all_owners(rig: Rig) -> None:
    rig.hold_first()
    rig.submit("a", "a0", "shared/a")
    rig.submit("b", "shared/b", "b0")
    rig.close()
    assert rig.backends.begun == ["first"]
    assert rig.told == []


def test_an_overdue_compile_fails_the_queued_ones_of_all_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_COMPILE_THREADS", 1)
    monkeypatch.setattr(compiler_module, "MAX_EXTRA_COMPILE_THREADS", 0)
    rig = Rig()
    rig.hold_first()
    rig.submit("a", "a0", "shared/a")
    rig.submit("b", "shared/b", "b0")
    rig.compiler._expire_job(rig.compiler._jobs[StructuredOutputs("regex", "first")])
    says = {name: str(error) for name, error in rig.told}
    assert "was not compiled within grammar_timeout" in says.pop("first")
    assert says.keys() == {"a0", "shared/a", "shared/b", "b0"}
    assert all("1 grammars that took longer" in message for message in says.values())
    assert (len(rig.compiler._queue), rig.compiler._num_queued_bytes) == (0, 0)
    assert rig.begun_after_first() == []
    rig.close()


class Rest(threading.Event):
    """Close event whose waits, the threads' rests, end one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Semaphore(0)
        self.num_begun = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_begun += 1
        return self.ends.acquire(timeout=10)


def test_an_owner_without_a_thread_comes_before_one_whose_thread_rests() -> None:
    rig, rest = Rig(), Rest()
    rig.backends.gate.set()
    rig.compiler._close_event = rest
    rig.submit("a", "a0", "a1")
    blocking_until(lambda: rest.num_begun == 2)
    rig.submit("a", "a2", "a3")
    rig.submit("b", "b0", "b1")
    rest.ends.release()
    blocking_until(lambda: rest.num_begun == 3)
    assert rig.backends.begun[2:] == ["b0"]
    rest.ends.release(10)
    blocking_until(lambda: not rig.compiler._threads)
    assert len(rig.backends.begun) == 6
    rig.close()


async def test_the_compiler_gets_the_owners_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_COMPILE_THREADS", 1)
    monkeypatch.setattr(compiler_module, "MAX_COOLDOWN_SECONDS", 0.0)
    async with ByteRig().engine() as engine:
        backends = thread_of(engine).grammar_compiler.backends
        compile_, begun, gate = backends.compile, [], threading.Event()

        def compile_gated(spec: StructuredOutputs, begin: Any) -> Grammar:
            begun.append(spec.text)
            assert gate.wait(10)
            return compile_(spec, begin)

        monkeypatch.setattr(backends, "compile", compile_gated)
        streams = []
        for name in ("first", "a0", "a1", "a2", "b0", "b1"):
            asked = {"regex": name}
            streams.append(engine.stream("x", structured_outputs=asked, owner=name[0]))
            await until(lambda: begun)
        gate.set()
        texts = [(await stream.result()).text for stream in streams]
    assert texts == ["first", "a0", "a1", "a2", "b0", "b1"]
    assert begun == ["first", "a0", "b0", "a1", "b1", "a2"]


def refused(rig: Rig, *names: str) -> list[str]:
    """Submit one request after the other; returns the texts that were compiled for them."""
    rig.backends.gate.set()
    rig.backends.begun.clear()
    for name in names:
        rig.told.clear()
        rig.submit("a", name)
        blocking_until(lambda: rig.told)
    return rig.backends.begun


def test_the_newest_refusals_are_not_compiled_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "SLOW_REFUSAL_SECONDS", 0.0)
    monkeypatch.setattr(compiler_module, "MAX_REMEMBERED_REFUSALS", 2)
    rig.backends.errors = {name: GrammarError(f"no {name}") for name in "xyz"}
    assert refused(rig, "x", "x/1") == ["x"]
    first = rig.told[0][1]
    assert refused(rig, "x/2") == []
    (_, second), *_ = rig.told
    assert str(first) == str(second) == "structured_outputs.regex='x': no x"
    assert second is not first
    assert getattr(second, "param", None) == "structured_outputs"
    assert refused(rig, "y", "z", "y", "z", "x") == ["y", "z", "x"]


def test_quick_refusals_and_other_errors_are_compiled_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "SLOW_REFUSAL_SECONDS", 60.0)
    rig.backends.errors = {"x": GrammarError("no")}
    assert refused(rig, "x", "x") == ["x", "x"]
    monkeypatch.setattr(compiler_module, "SLOW_REFUSAL_SECONDS", 0.0)
    rig.backends.errors = {"x": MemoryError()}
    assert refused(rig, "x", "x") == ["x", "x"]
