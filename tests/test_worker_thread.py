"""WorkerThread: order, results, cancelled callers, rest and close."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from asyncllm.errors import EngineClosedError
from asyncllm.runtime import worker_thread
from asyncllm.runtime.worker_thread import (
    MIN_TURN_SECONDS,
    POLL_SECONDS,
    Cooldown,
    TokenizerThreads,
    WorkerThread,
)
from asyncllm.testing import fake_engine
from asyncllm.text.long_text import LONG_TEXT_CHARACTERS
from tests.idle import until


def blocked(thread: WorkerThread) -> Callable[[], None]:
    """Let ``thread`` work until the returned function is called."""
    begun, go = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        go.wait(10)

    thread.submit(job)
    assert begun.wait(10)
    return go.set


def test_one_job_at_a_time_and_smaller_ones_overtake(monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=time.perf_counter)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(worker_thread, "time", clock)
    thread, told, idents = WorkerThread("w"), [], set()
    go = blocked(thread)

    def job(name):
        idents.add(threading.get_ident())
        told.append(name)
        return name

    sizes = {"large": 9, "small": 1, "medium": 5, "small too": 1}
    futures = [thread.submit(lambda name=name: job(name), size) for name, size in sizes.items()]
    clock.now = 9 / worker_thread.LARGE_JOB_DELAY_PER_SECOND
    futures.append(thread.submit(lambda: job("late")))
    go()
    assert [future.result(10) for future in futures] == [*sizes, "late"]
    assert told == ["small", "small too", "medium", "large", "late"]
    assert len(idents) == 1
    assert threading.get_ident() not in idents


async def test_a_call_runs_in_the_callers_context():
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("the caller's")
    assert await WorkerThread("w").call(variable.get) == "the caller's"


async def test_call_returns_or_raises_and_cancelled_call_never_begins():
    thread, told = WorkerThread("w"), []
    assert await thread.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 / 0)
    go = blocked(thread)
    cancelled = asyncio.ensure_future(thread.call(lambda: told.append("cancelled")))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    go()
    await thread.call(lambda: told.append("last"), 1)
    assert told == ["last"]


async def test_close_drops_waiting_and_cuts_running_compiles():
    rest = Cooldown(lambda: True)
    thread = WorkerThread("w", rest)
    go = blocked(thread)
    rest.extend(time.perf_counter() - 1e4)
    waiting = asyncio.ensure_future(thread.call(lambda: 1))
    future = thread.submit(lambda: 2)
    await asyncio.sleep(0.01)
    working = thread.close()
    with pytest.raises(EngineClosedError, match="before a long text's turn"):
        await waiting
    with pytest.raises(CancelledError):
        future.result(10)
    go()
    assert working is not None
    working.join(10)
    assert not working.is_alive()


def test_a_thread_rests_twice_as_long_as_it_worked():
    thread = WorkerThread("w", Cooldown(lambda: True))
    began = time.perf_counter()
    thread.submit(lambda: time.sleep(0.05))
    thread.submit(lambda: None).result(10)
    assert time.perf_counter() - began >= 0.15


def test_a_thread_rests_while_another_has_to():
    rest = Cooldown(lambda: True)
    one, other = WorkerThread("w", rest), WorkerThread("w", rest)
    one.submit(lambda: time.sleep(0.05)).result(10)
    ended = time.perf_counter()
    assert other.submit(time.perf_counter).result(10) - ended >= 0.09


def test_a_thread_rests_only_while_it_is_needed():
    answers = [True, True, False]
    rest = Cooldown(lambda: answers.pop(0))
    rest.extend(time.perf_counter() - 100)
    began = time.perf_counter()
    rest.wait(threading.Event())
    assert answers == []
    assert 2 * POLL_SECONDS <= time.perf_counter() - began < 10


async def test_long_texts_rest_only_beside_running_requests():
    gate = threading.Semaphore(0)
    async with fake_engine("x" * 50, max_model_len=6000, num_blocks=2000, gate=gate) as engine:
        engine._cooldown.extend(time.perf_counter() - 1000)
        assert len(await engine.tokenize("a" * 5000)) == 5000
        stream = engine.stream("b", max_tokens=2)
        await until(lambda: engine.stats().num_running == 1)
        waiting = asyncio.ensure_future(engine.tokenize("a" * 5000))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        for _ in range(4):
            gate.release()
        await stream.result()
        assert len(await asyncio.wait_for(waiting, 10)) == 5000
        for _ in range(9):
            gate.release()


def test_a_short_text_waits_for_no_long_one_and_rests_behind_short_ones_alone():
    cooldown = Cooldown(lambda: True)
    threads = TokenizerThreads("w", cooldown)
    cooldown.extend(time.perf_counter() - 1e4)
    told = threading.Event()
    threads.submit(lambda most: told.set() or True, LONG_TEXT_CHARACTERS - 1)
    assert told.wait(10)
    cooldown.short_job_cooldown.extend(time.perf_counter() - 1e4)
    told.clear()
    threads.submit(lambda most: told.set() or True, 1)
    assert not told.wait(0.1)
    threads.close()


@pytest.mark.parametrize("size", [1, LONG_TEXT_CHARACTERS - 1, LONG_TEXT_CHARACTERS])
async def test_what_turns_out_to_be_long_moves_to_the_long_texts(size):
    threads, calls = TokenizerThreads("w", Cooldown(lambda: False)), []

    def job(most: int | None) -> bool:
        calls.append((threading.current_thread().name, most))
        return most is None

    tried = [("w-short", LONG_TEXT_CHARACTERS - 1)] if size < LONG_TEXT_CHARACTERS else []
    assert await threads.call(lambda most: job(most) or None, size)
    threads.submit(job, size)
    await until(lambda: len(calls) == 2 * len(tried) + 2)
    assert calls == 2 * [*tried, ("w", None)]


class FakeClock:
    """Clock of the worker threads, which jobs put forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(worker_thread, "time", clock)
        self.told: list[str] = []

    def job(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.told.append(name)
            self.now += seconds

        return run


def test_owners_take_turns_of_one_long_job_or_of_short_ones(monkeypatch):
    clock, thread = FakeClock(monkeypatch), WorkerThread("w")
    go = blocked(thread)
    for number in range(3):
        thread.submit(clock.job(f"a{number}", 1.0), 9 - number, "a")
    for number in range(12):
        thread.submit(clock.job(f"b{number}", MIN_TURN_SECONDS / 8), owner="b")
    last = [thread.submit(clock.job(f"none{number}", 1.0)) for number in range(2)]
    go()
    for future in last:
        future.result(10)
    thread.submit(lambda: None, 2**30, "a").result(10)
    # Within a's line the smallest job comes first.
    first_of_b, rest_of_b = [f"b{n}" for n in range(8)], [f"b{n}" for n in range(8, 12)]
    assert clock.told == ["a2", *first_of_b, "none0", "a1", *rest_of_b, "none1", "a0"]


async def test_a_cancelled_call_frees_its_job_and_takes_no_turn(monkeypatch):
    clock, thread = FakeClock(monkeypatch), WorkerThread("w")
    go = blocked(thread)

    class Body:
        def run(self) -> None:
            clock.told.append("cancelled")

    body = Body()
    freed = weakref.ref(body)
    cancelled = asyncio.ensure_future(thread.call(body.run, owner="a"))
    del body
    await asyncio.sleep(0)
    for name in ("a0", "a1"):
        thread.submit(clock.job(name, 1.0), owner="a")
    last = thread.submit(clock.job("b", 1.0), owner="b")
    cancelled.cancel()
    await asyncio.wait([cancelled])
    del cancelled
    assert freed() is None
    go()
    last.result(10)
    thread.submit(lambda: None, owner="a").result(10)
    assert clock.told == ["a0", "b", "a1"]


@pytest.mark.parametrize("size", [1, LONG_TEXT_CHARACTERS])
async def test_owners_take_turns_on_the_threads_of_texts(monkeypatch, size):
    clock, threads = FakeClock(monkeypatch), TokenizerThreads("w", Cooldown(lambda: False))
    go = blocked(threads.long_thread)
    go_short = blocked(threads._short_thread)

    def job(name: str) -> Callable[[int | None], bool]:
        def run(most: int | None) -> bool:
            if most is None:
                clock.job(name, 1.0)()
            return most is None

        return run

    for name in ("a0", "a1"):
        threads.submit(job(name), size, "a")
    waiting = asyncio.ensure_future(threads.call(lambda m: job("b")(m) or None, size, "b"))
    await asyncio.sleep(0)
    go_short()
    threads._short_thread.submit(lambda: None, 2**30, "a").result(10)
    await asyncio.sleep(0.05)
    go()
    assert await waiting
    await until(lambda: len(clock.told) == 3)
    assert clock.told == ["a0", "b", "a1"]
