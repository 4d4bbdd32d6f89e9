"""Observers and logging of the engine."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import subprocess
import sys
import threading

import pytest

from asyncllm import EngineClosedError, EngineDeadError, EngineOverloadedError, RequestError
from asyncllm.observer import ObserverNotifier
from asyncllm.outputs import Usage
from tests.fakes import fake

where = contextvars.ContextVar("where", default="nowhere")


class Recorder:
    def __init__(self):
        self.submitted = []
        self.finished = []
        self.threads = []

    def on_submit(self, request, submission):
        self.submitted.append(
            (request.request_id, submission.operation, submission.prompt, where.get())
        )
        self.threads.append(threading.current_thread().name)

    def on_finish(self, request, usage, error):
        self.finished.append((request.request_id, request.finish_reason, usage, error))
        self.threads.append(threading.current_thread().name)


async def test_an_observer_hears_of_each_request_twice():
    seen = Recorder()
    engine = fake().engine()
    engine.add_observer(seen)
    engine.add_observer(seen)
    async with engine:
        where.set("here")
        stream = engine.stream("1 2", max_tokens=3, request_id="a")
        # At once, in the caller's thread and context.
        assert seen.submitted == [("a", "text_completion", "1 2", "here")]
        result = await stream.result()
        assert len(seen.finished) == 1
        messages = [{"role": "user", "content": "1 2"}]
        await engine.chat(messages, max_tokens=1, request_id="b").result()
        assert seen.submitted[1] == ("b", "chat", messages, "here")
    assert seen.finished[0] == ("a", "length", result.usage, None)
    assert [name for name, *_ in seen.finished] == ["a", "b"]
    assert seen.threads == ["MainThread", "asyncllm-engine"] * 2


@pytest.mark.parametrize("depth", [1, 2])
async def test_every_ending_is_observed_once(depth):
    rig = fake(num_blocks=20, max_model_len=60, pipeline_depth=depth)
    rig.executor.row_errors["bad"] = ValueError("no")
    seen = Recorder()
    async with rig.engine() as engine:
        engine.add_observer(seen)
        await engine.pause()
        results = [
            engine.stream([i], max_tokens=20, request_id=name)
            for i, name in enumerate(["a", "b", "c", "bad"])
        ]
        results.append(engine.stream("9 " * 20, request_id="long", max_tokens=5))
        results.append(engine.stream([5], request_id="gone"))
        engine.abort(["gone", "gone"])
        await engine.resume()
        await asyncio.gather(*(s.result() for s in results), return_exceptions=True)
        await engine.pause()
        engine.stream([1], request_id="late")
    ends = {name: reason for name, reason, *_ in seen.finished}
    assert len(ends) == len(seen.finished) == len(seen.submitted) == 7
    assert ends["bad"] is None
    assert ends["gone"] == ends["late"] == "abort"
    assert {ends[name] for name in ("a", "b", "c", "long")} == {"length"}
    (error,) = (error for name, _, _, error in seen.finished if name == "bad")
    assert isinstance(error, RequestError)


async def test_a_text_that_turns_out_bad_is_observed():
    seen = Recorder()
    async with fake(num_blocks=3000).engine() as engine:
        engine.add_observer(seen)
        with pytest.raises(RequestError):
            await engine.stream("x " * 3000).result()
    ((_, reason, usage, error),) = seen.finished
    assert (reason, usage.prompt_tokens, usage.ttft) == (None, 0, None)
    assert isinstance(error, RequestError)


async def test_the_death_of_the_engine_is_the_end_of_each():
    rig = fake()
    rig.executor.faults[2] = RuntimeError("lost")
    seen = Recorder()
    async with rig.engine() as engine:
        engine.add_observer(seen)
        await engine.pause()
        streams = [engine.stream([i], max_tokens=90) for i in range(3)]
        await engine.resume()
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await stream.result()
    assert [type(error) for *_, error in seen.finished] == [EngineDeadError] * 3


async def test_refusals_are_counted_and_not_announced():
    seen = Recorder()
    async with fake().engine(max_queued_requests=2, max_queued_tokens=10) as engine:
        engine.add_observer(seen)
        await engine.pause()
        streams = [engine.stream([1] * 6, max_tokens=1)]
        for _ in range(3):
            with pytest.raises(EngineOverloadedError):
                engine.stream([1] * 5)
        streams.append(engine.stream([1], max_tokens=1))
        with pytest.raises(EngineOverloadedError):
            engine.stream([1])
        stats = engine.stats()
        assert (stats.num_rejected, stats.num_requests, len(seen.submitted)) == (4, 2, 2)
        await engine.resume()
        for stream in streams:
            await stream.result()
    with pytest.raises(EngineClosedError):
        engine.stream([1])
    assert len(seen.submitted) == len(seen.finished) == 2


class Silent:
    """An observer; subclasses hear of one thing or another."""

    def on_submit(self, request, submission): ...
    def on_finish(self, request, usage, error): ...


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
async def test_observer_error_on_engine_thread_kills_nothing(kind):
    class Failing(Silent):
        def on_first_token(self, *told):
            raise kind

        on_finish = on_first_token

    rig = fake()
    rig.executor.row_errors["bad"] = ZeroDivisionError()
    async with rig.engine() as engine:
        engine.add_observer(Failing())
        with pytest.raises(RequestError):
            await engine.generate([1], request_id="bad")
        result = await engine.generate([1], max_tokens=4)
        assert engine.state == "running"
        rig.executor.faults |= {i: OSError("lost") for i in range(100)}
        with pytest.raises(EngineDeadError, match="lost"):
            await asyncio.gather(*(engine.generate([i]) for i in range(3)))
    assert list(result.token_ids) == rig.executor.reference([1], 4)


@pytest.mark.parametrize(
    "kind", [ValueError, SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration]
)
async def test_observer_error_in_caller_thread_reaches_no_request(kind, caplog):
    class Failing:
        def on_submit(self, *told):
            raise kind("on purpose")

        on_first_token = on_finish = on_submit

    rig = fake()
    async with rig.engine() as engine:
        engine.add_observer(Failing())
        result = await engine.generate([1], max_tokens=4)
    assert list(result.token_ids) == rig.executor.reference([1], 4)
    for method in ("on_submit", "on_first_token", "on_finish"):
        assert f"an observer failed in Failing.{method}" in caplog.text


class Interrupting(Silent):
    def on_submit(self, request, submission):
        raise KeyboardInterrupt


async def test_observer_interrupts_caller_only_on_main_thread():
    rig = fake()
    async with rig.engine() as engine:
        engine.add_observer(Interrupting())
        stream = await asyncio.to_thread(engine.stream, [1], max_tokens=4)
        result = await stream.result()
    assert list(result.token_ids) == rig.executor.reference([1], 4)


async def test_interrupt_in_on_submit_reaches_caller_and_leaves_no_request():
    async with fake().engine() as engine:
        interrupting = Interrupting()
        engine.add_observer(interrupting)
        with pytest.raises(KeyboardInterrupt):
            engine.stream([1])
        engine.remove_observer(interrupting)
        await asyncio.wait_for(engine.aclose(drain=None), 10)


async def test_removed_observer_sees_ends_of_known_requests():
    seen = Recorder()
    async with fake().engine() as engine:
        engine.remove_observer(seen)
        engine.add_observer(seen)
        await engine.pause()
        known = engine.stream([1], max_tokens=1, request_id="known")
        engine.remove_observer(seen)
        unknown = engine.stream([2], max_tokens=1)
        await engine.resume()
        await known.result()
        await unknown.result()
    assert [name for name, *_ in seen.submitted] == ["known"]
    assert [name for name, *_ in seen.finished] == ["known"]


async def test_early_end_waits_for_the_announcement():
    order = []

    class Slow:
        def on_submit(self, request, submission):
            notifier.notify_finish(usage, None)
            order.append("submit")

        def on_finish(self, request, usage, error):
            order.append("finish")

    usage = Usage(1, 0, 0, 0.0, None, 0.0)
    notifier = ObserverNotifier(object(), (Slow(),))
    notifier.notify_submit(None)
    assert order == ["submit", "finish"]


class FirstTokens(Recorder):
    def __init__(self):
        super().__init__()
        self.order = []

    def on_first_token(self, request):
        assert request.first_token_at is not None
        assert request.group.channel.num_written == 0
        self.order.append(("first token", request.request_id))

    def on_finish(self, request, usage, error):
        self.order.append(("finish", request.request_id))


async def test_first_token_is_observed_once_before_read():
    rig = fake(num_blocks=20, max_model_len=60)
    rig.executor.row_errors["bad"] = ValueError("no")
    seen = FirstTokens()
    async with rig.engine() as engine:
        engine.add_observer(Recorder())
        engine.add_observer(seen)
        stream = engine.stream([1], request_id="a", max_tokens=20)
        await anext(stream)
        assert seen.order[0] == ("first token", "a")
        await stream.result()
        with pytest.raises(RequestError):
            await engine.generate([2], request_id="bad")
        assert seen.order == [("first token", "a"), ("finish", "a"), ("finish", "bad")]
        # Preempted requests start over; their first token was long ago.
        names = [f"many {i}" for i in range(6)]
        await asyncio.gather(
            *(engine.generate([3] * 3, request_id=name, max_tokens=25) for name in names)
        )
        assert engine.stats().num_preemptions > 0
        for name in names:
            assert [what for what, whose in seen.order if whose == name] == [
                "first token",
                "finish",
            ]


async def test_first_token_before_submission_is_observed_before_end():
    order = []

    class Slow:
        def on_submit(self, request, submission):
            notifier.notify_first_token()
            order.append("submit")

        def on_first_token(self, request):
            order.append("first token")

        def on_finish(self, request, usage, error):
            order.append("finish")

    notifier = ObserverNotifier(object(), (Slow(),))
    notifier.notify_submit(None)
    assert order == ["submit"]
    notifier.notify_finish(Usage(1, 1, 0, 0.0, 0.0, 0.0), None)
    assert order == ["submit", "first token", "finish"]


async def test_the_end_is_observed_before_it_can_be_read():
    readable = []

    class Early(Silent):
        def on_finish(self, request, usage, error):
            readable.append(request.group.channel.ended)

    rig = fake()
    rig.executor.row_errors["bad"] = ValueError("no")
    async with rig.engine() as engine:
        engine.add_observer(Early())
        await engine.generate([1], max_tokens=1)
        with pytest.raises(RequestError):
            await engine.generate([1], request_id="bad")
        stream = engine.stream([1])
        stream.abort()
        await stream.result()
    assert readable == [False] * 3


async def test_a_death_is_logged_once_with_its_cause(caplog):
    rig = fake()
    rig.executor.faults[0] = RuntimeError("device lost")
    async with rig.engine() as engine:
        with pytest.raises(EngineDeadError):
            await engine.generate([1])
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert (record.levelname, record.message) == ("ERROR", "the engine died")
    assert "device lost" in str(record.exc_info[1])


async def test_logs_are_silent_without_handlers():
    code = """
import asyncio
from tests.fakes import fake
async def main():
    rig = fake()
    rig.executor.faults[0] = RuntimeError("device lost")
    async with rig.engine() as engine:
        try:
            await engine.generate([1])
        except Exception:
            pass
asyncio.run(main())
import logging
assert logging.getLogger("asyncllm").level == logging.NOTSET
assert logging.getLogger("asyncllm").propagate
assert logging.getLogger().handlers == []
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert (out.stdout, out.stderr) == ("", "")
