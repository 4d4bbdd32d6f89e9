"""WorkerThread: order, results, cancelled callers, rest and close."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from asyncllm.errors import EngineClosedError
from asyncllm.runtime import worker_thread
from asyncllm.runtime.worker_thread import POLL_SECONDS, Cooldown, TokenizerThreads, WorkerThread
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
