"""How an engine begins and how it ends: starts that fail at every stage, endings that are told,
and threads, locks and loops that are in the way."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import pkgutil
import sys
import threading
import time
import weakref
from contextlib import nullcontext

import anyio
import pytest
import uvloop

from asyncllm import (
    LLM,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    RequestError,
)
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.runtime.mailbox import MailboxRegistry
from tests.event_loops import BACKENDS, run  # noqa: F401 - a fixture, by its name
from tests.fakes import core_of, fake, thread_of
from tests.idle import blocking_until, until
from tests.unprintable import UNPRINTABLE

ENGINE_THREAD = "asyncllm.runtime.engine_thread"


def engine_threads():
    return [t for t in threading.enumerate() if t.name == "asyncllm-engine"]


def the_loader(rig, patch, stop):
    rig.load_gate = type("Gate", (), {"wait": lambda self, timeout: stop()})()


def the_numbers(rig, patch, stop):
    """The pool refuses what the executor reports."""

    class Executor(type(rig.executor)):
        @property
        def info(self):
            stop()
            return rig.info

        @info.setter
        def info(self, value):
            pass

    rig.executor = Executor(rig.info)


def named(target):
    """Stops right before ``target`` is called."""

    def patch_it(rig, patch, stop):
        original = pkgutil.resolve_name(target)
        patch.setattr(target, lambda *args, **options: (stop(), original(*args, **options))[1])

    return patch_it


def listen(patch, heard):
    """Has a filter of the application's on every record of the package's own logger."""
    log = logging.getLogger("asyncllm")
    patch.setattr(log, "isEnabledFor", lambda level: True)
    patch.setattr(log, "filters", [lambda record: heard(record.getMessage()) or True])


def the_log(rig, patch, stop):
    listen(patch, lambda message: message.startswith("engine started") and stop() and None)


# Where a start can be met on the engine thread.
STAGES = {
    "loader": the_loader,
    "executor": the_numbers,
    "scheduler": named(f"{ENGINE_THREAD}.Scheduler"),
    "admission": named(f"{ENGINE_THREAD}.Admission"),
    "core": named(f"{ENGINE_THREAD}.EngineCore"),
    "exit hook": named("atexit.register"),
}
# And on the caller's.
CALLERS = {
    "thread": named(f"{ENGINE_THREAD}.EngineThread.start"),
    "intake": named("asyncllm.engine.InputProcessor"),
    "task": named(f"{ENGINE_THREAD}.EngineThread.supervise"),
}


@pytest.mark.parametrize(
    ("stage", "kind"),
    [(stage, kind) for kind in (MemoryError, SystemExit) for stage in STAGES]
    + [(stage, MemoryError) for stage in CALLERS],
)
def test_failed_start_is_reported_and_can_be_retried(stage, kind, monkeypatch):
    rig = fake()
    failure = kind("on purpose")

    def fail():
        raise failure

    with monkeypatch.context() as patch:
        (STAGES | CALLERS)[stage](rig, patch, fail)
        engine = rig.engine()

        async def start():
            await asyncio.wait_for(engine.start(), 10)

        with pytest.raises(EngineError if stage in STAGES else kind) as caught:
            asyncio.run(start())
    assert (caught.value.__cause__ if stage in STAGES else caught.value) is failure
    assert (engine.state, engine.error) == ("new", None)
    blocking_until(lambda: not engine_threads())
    assert rig.executor.closed is (stage not in ("loader", "thread"))

    async def again():
        rig.load_gate, rig.executor = None, fake().executor
        async with engine:
            completion = await engine.generate([1], max_tokens=3)
        return list(completion.token_ids)

    assert asyncio.run(again()) == rig.executor.reference([1], 3)


@pytest.mark.parametrize("stage", ["scheduler", "exit hook", "intake"])
def test_a_start_that_fails_without_a_loop(stage, monkeypatch):
    rig = fake()
    with monkeypatch.context() as patch:
        (STAGES | CALLERS)[stage](rig, patch, lambda: 1 / 0)
        engine = rig.engine()
        with pytest.raises((EngineError, ZeroDivisionError)):
            engine._start_blocking()
    assert engine.state == "new"
    blocking_until(lambda: not engine_threads())
    assert rig.executor.closed


def test_an_executor_with_invalid_limits():
    """And that cannot be closed either: the first error counts."""
    rig = fake()
    rig.executor.info = dataclasses.replace(rig.info, num_blocks=1)
    rig.executor.close = sys.exit
    engine = rig.engine()
    with pytest.raises(EngineError, match=r"could not start: ValueError: num_blocks=1"):
        asyncio.run(engine.start())
    blocking_until(lambda: not engine_threads())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", [*STAGES, "log", "ready"])
def test_a_start_that_is_cancelled_leaves_nothing(stage, backend, monkeypatch):
    """In each stage, and between the end of the last and the caller's return."""
    rig = fake()
    reached, go = threading.Event(), threading.Event()
    STAGES.get(stage, the_log)(rig, monkeypatch, lambda: (reached.set(), go.wait(10)))
    engine = rig.engine()

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(engine.start)
            await until(reached.is_set)
            assert engine.state == "starting"
            with pytest.raises(EngineClosedError, match="is starting"):
                await engine.wait_closed()
            if stage == "ready":
                ready = thread_of(engine).ready
                go.set()
                blocking_until(ready.done)  # the loop stands still meanwhile
            group.cancel_scope.cancel()
        assert engine.state == "new"

    name, options = BACKENDS[backend]
    anyio.run(main, backend=name, backend_options=options)
    go.set()
    blocking_until(lambda: not engine_threads())
    assert rig.executor.closed is (stage != "loader")


@pytest.mark.parametrize(
    "kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
@pytest.mark.parametrize("place", ["filter", "handler"])
async def test_a_log_that_raises_does_not_end_the_engine(place, kind, monkeypatch, capsys):
    """In the middle of steps as well: of one that ran out of memory, of an observer that failed."""
    rig, heard = fake(), []
    prompt = list(range(9))
    rig.executor.faults[0] = StepOutOfMemoryError("on purpose")
    rig.executor.close = lambda: 1 / 0

    def hear(message):
        heard.append(message)
        raise kind("in the log")

    if place == "filter":
        listen(monkeypatch, hear)
    else:
        listen(monkeypatch, lambda message: None)
        handler = type("", (logging.Handler,), {"emit": lambda _, r: hear(r.getMessage())})()
        monkeypatch.setattr(logging.getLogger("asyncllm"), "handlers", [handler])

    class Observer:
        def on_submit(self, request, info):
            pass

        on_first_token = on_finish = "no method"  # calling it fails

    engine = rig.engine()
    engine.add_observer(Observer())
    async with engine:
        completion = await engine.generate(prompt, max_tokens=9)
    assert (engine.state, engine.error) == ("closed", None)
    assert list(completion.token_ids) == rig.executor.reference(prompt, 9)
    for told in ("engine started", "a step ran out", "an observer", "the executor", "engine ended"):
        assert any(message.startswith(told) for message in heard), heard
    assert capsys.readouterr().err.count(f"{kind.__name__}: in the log") == len(heard)


def test_the_life_of_an_engine(run):
    rig = fake()

    async def main():
        engine = rig.engine()
        assert (engine.state, engine.error) == ("new", None)
        with pytest.raises(EngineClosedError, match="is new"):
            await engine.wait_closed()
        rig.load_gate = threading.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(engine.start)
            while engine.state == "new":
                await anyio.sleep(0.001)
            assert engine.state == "starting"
            rig.load_gate.set()
        assert (engine.state, engine.error) == ("running", None)
        told = []

        async def wait():
            await engine.wait_closed()
            told.append(rig.executor.closed)

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(wait)
            with anyio.move_on_after(0.01):
                await engine.wait_closed()
            assert told == []
            await engine.aclose()
        assert told == [True] * 5
        await engine.wait_closed()
        assert (engine.state, engine.error) == ("closed", None)
        assert repr(engine) == "<AsyncLLMEngine 'asyncllm/demo' closed>"

    run(main)


async def test_closing_an_engine_that_was_never_started():
    engine = fake().engine()
    await engine.aclose()
    await engine.wait_closed()
    assert (engine.state, engine.error) == ("closed", None)


def test_the_death_of_an_engine(run, caplog):
    rig = fake()
    lost = RuntimeError("device lost")
    rig.executor.faults[2] = lost

    async def main():
        engine = rig.engine()
        await engine.start()
        told = []

        async def wait():
            try:
                await engine.wait_closed()
            except EngineDeadError as error:
                told.append(error.__cause__)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(wait)
            with pytest.raises(EngineDeadError):
                await engine.generate([1], max_tokens=9)
            # Who reads of the death finds it.
            assert engine.state == "dead"
        await wait()
        assert told == [lost] * 4
        assert isinstance(engine.error, EngineDeadError)
        assert engine.error.__cause__ is lost
        assert "dead" in repr(engine)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        assert (stats.num_failed, stats.num_free_blocks) == (1, stats.num_blocks)
        await engine.aclose()
        assert engine.state == "closed"
        assert engine.error.__cause__ is lost
        with pytest.raises(EngineClosedError):
            engine.stats()
        await wait()
        assert len(told) == 5

    run(main)
    assert "the engine died" in caplog.text


@pytest.mark.parametrize("how", UNPRINTABLE)
async def test_unprintable_device_error_ends_all(how):
    rig = fake(gate=0)
    odd = rig.executor.faults[2] = UNPRINTABLE[how]()
    engine = rig.engine()
    await engine.start()
    streams = [engine.stream([i], max_tokens=9) for i in range(3)]
    rig.executor.gate.release(9)
    for ended in [*(stream.result() for stream in streams), engine.wait_closed()]:
        with pytest.raises(EngineDeadError) as caught:
            await asyncio.wait_for(ended, 10)
        assert caught.value.__cause__ is odd
    assert (engine.state, engine.error.__cause__) == ("dead", odd)
    await engine.aclose()


@pytest.mark.parametrize("how", UNPRINTABLE)
async def test_unprintable_start_error(how):
    rig = fake()
    rig.load_error = UNPRINTABLE[how]()
    engine = rig.engine()
    with pytest.raises(EngineError, match="could not start") as caught:
        await asyncio.wait_for(engine.start(), 10)
    assert caught.value.__cause__ is rig.load_error
    assert engine.state == "new"


@pytest.mark.parametrize("how", UNPRINTABLE)
async def test_unprintable_row_error_ends_only_that_request(how):
    rig = fake()
    odd = rig.executor.row_errors["bad"] = UNPRINTABLE[how]()
    async with rig.engine() as engine:
        good = engine.stream([2], max_tokens=4)
        with pytest.raises(RequestError, match="'bad' failed") as caught:
            await asyncio.wait_for(engine.generate([1], request_id="bad"), 10)
        assert caught.value.__cause__ is odd
        assert list((await good.result()).token_ids) == rig.executor.reference([2], 4)


@pytest.mark.parametrize("kind", [EngineDeadError, EngineClosedError, asyncio.CancelledError])
async def test_an_error_of_a_row_does_not_speak_of_the_engine(kind):
    rig = fake()
    own = rig.executor.row_errors["own"] = kind("the engine is gone")
    told = rig.executor.row_errors["told"] = InvalidRequestError("not this")
    async with rig.engine() as engine:
        with pytest.raises(RequestError, match=r"failed: .*the engine is gone") as caught:
            await engine.generate([1], request_id="own")
        assert caught.value.__cause__ is own
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate([1], request_id="told")
        assert (type(caught.value), str(caught.value)) == (type(told), str(told))


async def test_tokenisation_error_does_not_name_the_engine():
    """On the worker thread, where it meets a tokenizer of the application's."""
    rig = fake(num_blocks=2000)
    own = EngineClosedError("the engine is gone")

    def encode(*_):
        raise own

    async with rig.engine() as engine:
        rig.tokenizer.encode = encode
        with pytest.raises(RequestError, match="the engine is gone") as caught:
            await engine.generate("word " * 2000)
        assert caught.value.__cause__ is own


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("at_work", [False, True])
@pytest.mark.filterwarnings("ignore:coroutine")
def test_closing_loop_with_tasks_ends_engine(new_loop, at_work):
    rig = fake(step_time=0.001)
    engine, loop = rig.engine(), new_loop()
    loop.run_until_complete(engine.start())
    read = loop.run_until_complete(engine.generate([1], max_tokens=2))
    assert len(read.token_ids) == 2
    stream = engine.stream([1], max_tokens=200) if at_work else None
    gc.disable()
    try:
        assert engine.state == "running"
        loop.close()
        assert engine.state == "closed"
        blocking_until(lambda: rig.executor.closed)
    finally:
        gc.enable()
    for call in (lambda: engine.stream([1]), lambda: asyncio.run(engine.wait_closed())):
        with pytest.raises(EngineClosedError, match="event loop that the engine was started on"):
            call()
    if stream is not None:
        assert asyncio.run(stream.result()).finish_reason == "abort"
    asyncio.run(engine.aclose())
    assert "event loop" in str(engine.error)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_surviving_loop_keeps_nothing_of_the_engine():
    async with fake().engine() as engine:
        thread = weakref.ref(thread_of(engine))
    del engine
    gc.collect()
    assert thread() is None
    assert not [h for h in asyncio.get_running_loop()._scheduled if not h.cancelled()]


WAITS = {
    "aclose": lambda engine: engine.aclose(),
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "reset": lambda engine: engine.reset_prefix_cache(),
    "wait_closed": lambda engine: engine.wait_closed(),
    "generate": lambda engine: engine.generate([3], max_tokens=1),
}


@pytest.mark.parametrize("verb", [*WAITS, "close", "read"])
def test_the_engine_thread_cannot_wait_for_itself(verb):
    """The engine goes on, and every other thread may wait for it."""
    rig = fake()
    raised = []

    class Observer:
        def on_submit(self, request, submission):
            pass

        def on_finish(self, request, usage, error):
            if raised or threading.current_thread().name != "asyncllm-engine":
                return
            try:
                if verb == "close":
                    engine._close_blocking()
                elif verb == "read":
                    LLM(engine=engine).generate([3], max_tokens=1)
                else:
                    raised.append(None)
                    asyncio.run(WAITS[verb](engine))
            except RuntimeError as error:
                raised[:] = [error]

    async def main():
        engine.add_observer(Observer())
        async with engine:
            completion = await asyncio.wait_for(engine.generate([1], max_tokens=3), 10)
            assert engine.state == "running"
            assert list(completion.token_ids) == rig.executor.reference([1], 3)
            await asyncio.wait_for(engine.pause(), 10)
            await asyncio.wait_for(engine.resume(), 10)

    engine, ended = rig.engine(), []
    # On a daemon thread: an engine that does wait for itself never closes.
    thread = threading.Thread(target=lambda: ended.append(asyncio.run(main())), daemon=True)
    thread.start()
    thread.join(30)
    assert ended == [None]
    assert "the engine thread cannot wait" in str(raised[0])


def test_an_engine_whose_loop_has_ended_says_so(run):
    rig = fake()
    engine = rig.engine()
    run(engine.start)
    blocking_until(lambda: rig.executor.closed)
    assert engine.state == "closed"
    assert isinstance(engine.error, EngineClosedError)
    for call in (lambda: engine.stream([1]), engine.stats, lambda: run(engine.wait_closed)):
        with pytest.raises(EngineClosedError, match="event loop that the engine was started on"):
            call()
    run(engine.aclose)
    assert "event loop" in str(engine.error)


@pytest.mark.parametrize("paused", ["before", "at the same time"])
def test_closing_lets_a_paused_engine_finish(run, paused):
    """``resume`` is refused from then on."""
    rig = fake(gate=0)

    async def main():
        engine = rig.engine()
        await engine.start()
        if paused == "before":
            await engine.pause()
        stream = engine.stream([1], max_tokens=9)
        async with anyio.create_task_group() as group:
            if paused == "at the same time":
                await anyio.to_thread.run_sync(blocking_until, lambda: engine.stats().num_running)
                group.start_soon(engine.pause)
                await until(lambda: core_of(engine)._calls_between_steps._unfinished_futures)
            rig.executor.gate.release(100)
            with anyio.fail_after(10):
                await engine.aclose(drain=None)
        assert list((await stream.result()).token_ids) == rig.executor.reference([1], 9)

    run(main)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("kind", [OSError, SystemExit])
async def test_a_device_that_fails_to_close_is_reported(kind, dies, caplog):
    rig = fake()

    def close():
        raise kind("on purpose")

    rig.executor.close = close
    if dies:
        rig.executor.faults[2] = RuntimeError("device lost")
    async with rig.engine() as engine:
        with pytest.raises(EngineDeadError) if dies else nullcontext():
            await engine.generate([1], max_tokens=9)
    assert (engine.state, engine.error is None) == ("closed", not dies)
    (record,) = (r for r in caplog.records if r.message == "the executor could not be closed")
    assert isinstance(record.exc_info[1], kind)


async def test_dead_then_hung_device_reports_the_first_error(caplog):
    rig = fake()
    lost, gate = RuntimeError("device lost"), threading.Event()
    rig.executor.faults[2] = lost
    rig.executor.close = lambda: gate.wait(10)
    async with rig.engine(step_timeout=0.25) as engine:
        with pytest.raises(EngineDeadError):
            await engine.generate([1], max_tokens=9)
    assert engine.error.__cause__ is lost
    assert "longer than step_timeout=0.25 s" in caplog.text
    gate.set()


def test_aclose_does_not_wait_for_hung_device(run):
    rig = fake()
    gate = threading.Event()
    rig.executor.close = lambda: gate.wait(10)

    async def main():
        engine = rig.engine(step_timeout=0.25)
        await engine.start()
        stream = engine.stream([1], max_tokens=3)
        with anyio.fail_after(5):
            await engine.aclose(drain=None)
        assert (await stream.result()).finish_reason == "length"
        assert (engine.state, isinstance(engine.error, EngineDeadError)) == ("closed", True)

    run(main)
    gate.set()


def hung_engine():
    """A core whose thread waits in a step, and what lets that go on."""
    rig = fake(gate=2)
    engine = rig.engine()
    engine._start_blocking()
    stream = engine.stream([1], max_tokens=9)
    core = core_of(engine)
    blocking_until(lambda: core.stats().num_steps == 2 and core._executor_call_began_at is not None)
    return rig, engine, stream, core


def test_one_of_several_watchers_declares_the_thread_hung():
    rig, engine, _stream, core = hung_engine()
    cause, verdicts, clock = EngineError("stuck"), [], core.clock
    others = [
        threading.Thread(target=lambda: verdicts.append(core.fail_if_hung(0, cause)))
        for _ in range(4)
    ]

    def slow_clock():
        """While the first decides, the others come."""
        if not verdicts and others[0].ident is None:
            for thread in others:
                thread.start()
            time.sleep(0.05)
        return clock()

    core.clock = slow_clock
    verdicts.append(core.fail_if_hung(0, cause))
    for thread in others:
        thread.join(10)
    assert sorted(verdicts) == [False] * 4 + [True]
    assert core.stats().num_failed == 1
    rig.executor.gate.release(100)
    blocking_until(lambda: not engine_threads())
    assert engine.error.__cause__ is cause


def test_thread_returning_after_hang_touches_nothing():
    rig, _engine, stream, core = hung_engine()
    clock = core.clock

    def slow_clock():
        """The device answers while the watcher is deciding."""
        rig.executor.gate.release(100)
        time.sleep(0.05)
        return clock()

    deliver, delivered = core.output_processor.deliver, []
    core.output_processor.deliver = lambda event, now: (
        delivered.append(event),
        deliver(event, now),
    )
    watcher = threading.get_ident()
    core.clock = lambda: slow_clock() if threading.get_ident() == watcher else clock()
    assert core.fail_if_hung(0, EngineError("stuck"))
    blocking_until(lambda: not engine_threads())
    assert delivered == []
    assert core.stats().num_steps == 2
    tokens = []

    async def read():
        async for delta in stream:
            tokens.extend(delta.token_ids)

    with pytest.raises(EngineDeadError, match="stuck"):
        asyncio.run(read())
    assert tokens == rig.executor.reference([1], 2)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_destructor_takes_no_lock():
    """A garbage collection may run it on the engine thread in the middle of anything."""
    rig = fake()
    engine = rig.engine()
    engine._start_blocking()
    core = core_of(engine)
    last = [engine]
    threads = engine._input_processor.submitter._tokenizer_threads
    locks = [
        core._lock,
        core.admission._lock,
        threads.long_thread._lock,
        threads._short_thread._lock,
    ]
    del engine, threads

    def collect_among_locks():
        for lock in locks:
            lock.acquire()
        last.clear()
        gc.collect()
        for lock in locks:
            lock.release()

    core.send(collect_among_locks)
    blocking_until(lambda: rig.executor.closed)
    with pytest.raises(EngineClosedError):
        core.admission.reserve(None, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_during_tokenisation_does_not_block_loop(backend):
    """The text ends only if the loop goes on."""
    rig = fake(num_blocks=3001)
    opened, seen = threading.Event(), []

    class Gate:
        def wait(self, timeout):
            seen.append("begun")
            seen.append(opened.wait(1.5))

    rig.tokenizer.gate = Gate()

    async def main():
        engine = rig.engine()
        await engine.start()
        stream = engine.stream("5 " * 3000)
        await until(lambda: seen)

        async def open_it():
            await engine.wait_closed()
            await anyio.sleep(0.05)
            opened.set()

        async with anyio.create_task_group() as group:
            group.start_soon(open_it)
            await engine.aclose()
            assert not [t for t in threading.enumerate() if t.name.startswith("asyncllm")]
        assert (await stream.result()).finish_reason == "abort"

    name, options = BACKENDS[backend]
    anyio.run(main, backend=name, backend_options=options)
    assert seen == ["begun", True]


def test_new_loop_during_cleanup_of_closed_loops():
    registry = MailboxRegistry()

    async def come():
        return registry.of_running_loop()

    class Gone:
        """Asked whether it is closed, it lets another loop come before it answers."""

        coming = False

        def is_closed(self):
            if not self.coming:
                Gone.coming = True
                thread = threading.Thread(target=lambda: asyncio.run(come()))
                thread.start()
                thread.join()
            return True

    registry._mailbox_by_loop |= {"one": Gone(), "two": Gone()}
    mailbox = asyncio.run(come())
    assert Gone.coming
    # The other loop has removed them already.
    assert mailbox in registry._mailbox_by_loop.values()
    assert not any(isinstance(one, Gone) for one in registry._mailbox_by_loop.values())
