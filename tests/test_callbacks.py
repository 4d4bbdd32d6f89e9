"""stream_with_callbacks: calls of handlers, and their errors."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import uuid

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asyncllm import (
    ContextLengthExceededError,
    DeadlineExceededError,
    InvalidRequestError,
    RequestError,
)
from asyncllm.callbacks import stream_with_callbacks
from tests.fakes import fake
from tests.idle import until

WHOLE = ["on_llm_start", "on_llm_new_token", "on_llm_end"]
CHAT = [{"role": "system", "content": "7"}, {"role": "user", "content": "8 9"}]


class Recorder:
    """Every event with its arguments, synchronous."""

    def __init__(self):
        self.events = []
        self.threads = set()

    def _note(self, name, args, kwargs):
        self.threads.add(threading.current_thread().name)
        self.events.append((name, args, kwargs))

    @property
    def names(self):
        names = [name for name, _, _ in self.events]
        return [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]

    def of(self, name):
        return [(args, kwargs) for n, args, kwargs in self.events if n == name]

    @property
    def error(self):
        """The exception that it was told first, and what came with that."""
        ((error,), kwargs), *_ = self.of("on_llm_error")
        return error, kwargs


class AsyncRecorder(Recorder):
    """Every event with its arguments, asynchronous."""


def record(event, kind):
    async def note_later(self, *args, **kwargs):
        self._note(event, args, kwargs)

    def note(self, *args, **kwargs):
        self._note(event, args, kwargs)

    setattr(kind, event, note if kind is Recorder else note_later)


for event in ("start", "new_token", "end", "error"):
    for kind in (Recorder, AsyncRecorder):
        record(f"on_llm_{event}", kind)
        record("on_chat_model_start", kind)


async def told(engine, handlers, prompt=(1,), **options):
    """The completion of a stream that is read to its end."""
    stream = stream_with_callbacks(engine, prompt, handlers=handlers, **options)
    return await stream.result()


@pytest.mark.parametrize("kind", [Recorder, AsyncRecorder])
async def test_a_prompt_is_told_from_start_to_end(kind):
    rig, handler = fake(), kind()
    run_id, parent = uuid.uuid4(), uuid.uuid4()
    async with rig.engine() as engine:
        stream = stream_with_callbacks(
            engine,
            "1 2 3",
            handlers=[handler],
            run_id=run_id,
            parent_run_id=parent,
            tags=["a", "b"],
            metadata={"user": 7},
            run_name="story",
            max_tokens=6,
        )
        deltas = [delta async for delta in stream]
        plain = await engine.generate("1 2 3", max_tokens=6)
    assert "".join(map(str, deltas)) == plain.text
    assert handler.names == WHOLE
    for _, _, kwargs in handler.events:
        assert kwargs["run_id"] == run_id == stream.run_id
        assert kwargs["parent_run_id"] == parent
        assert kwargs["tags"] == ["a", "b"]
    ((serialized, prompts), start), *_ = handler.of("on_llm_start")
    assert (serialized["id"][-1], prompts) == ("AsyncLLMEngine", ["1 2 3"])
    assert (start["metadata"], start["name"]) == ({"user": 7}, "story")
    assert start["invocation_params"]["max_tokens"] == 6
    tokens = handler.of("on_llm_new_token")
    assert [args[0] for args, _ in tokens] == [delta.text for delta in deltas]
    assert [kwargs["chunk"].text for _, kwargs in tokens] == [delta.text for delta in deltas]
    assert tokens[-1][1]["chunk"].generation_info == {"finish_reason": "length"}
    ((result,), _), *_ = handler.of("on_llm_end")
    (generation,) = result.generations[0]
    assert (generation.text, generation.type) == (plain.text, "Generation")
    assert result.llm_output["token_usage"]["completion_tokens"] == 6
    assert result.model_dump()["generations"][0][0]["text"] == plain.text


async def test_a_conversation_is_told_as_messages():
    rig, handler = fake(), Recorder()
    async with rig.engine() as engine:
        stream = stream_with_callbacks(engine, CHAT, handlers=[handler], max_tokens=3)
        completion = await stream.result()
    assert completion.prompt_token_ids == (7, 8, 9)
    assert handler.names == ["on_chat_model_start", "on_llm_new_token", "on_llm_end"]
    ((_, (messages,)), _), *_ = handler.of("on_chat_model_start")
    assert [(m.type, m.role, m.content) for m in messages] == [
        ("system", "system", "7"),
        ("human", "user", "8 9"),
    ]
    ((result,), _), *_ = handler.of("on_llm_end")
    (generation,) = result.generations[0]
    assert generation.message.content == generation.message.text == completion.text
    assert generation.message.response_metadata["finish_reason"] == "length"
    assert generation.message.usage_metadata == {
        "input_tokens": 3,
        "output_tokens": 3,
        "total_tokens": 6,
        "input_token_details": {"cache_read": 0},
    }
    chunk = handler.of("on_llm_new_token")[-1][1]["chunk"]
    assert chunk.message.usage_metadata == generation.message.usage_metadata


@pytest.mark.parametrize("how", ["missing", "not implemented"])
async def test_a_handler_without_chat_gets_one_prompt(how):
    class Old(Recorder):
        if how == "missing":
            on_chat_model_start = None
        else:

            def on_chat_model_start(self, *args, **kwargs):
                raise NotImplementedError

    rig, handler = fake(), Old()
    async with rig.engine() as engine:
        await told(engine, [handler], CHAT, max_tokens=2)
    assert handler.names == WHOLE
    ((_, prompts), _), *_ = handler.of("on_llm_start")
    assert prompts == ["System: 7\nHuman: 8 9"]


async def test_token_ids_and_objects_with_few_methods():
    class OnlyEnds:
        def on_llm_end(self, result, **kwargs):
            self.text = result.generations[0][0].text

    handler, all_of_it = OnlyEnds(), Recorder()
    async with fake().engine() as engine:
        for prompt in ([4, 5], np.array([4, 5])):
            completion = await told(engine, [handler, object(), all_of_it], prompt, max_tokens=2)
            assert completion.text == handler.text
    assert all_of_it.of("on_llm_start")[0][0][1] == ["4 5"]


async def test_ignored_events_are_not_told():
    class Deaf(Recorder):
        ignore_llm = True
        ignore_chat_model = True

    rig, handler = fake(), Deaf()
    async with rig.engine() as engine:
        for prompt in ("1 2", CHAT):
            await told(engine, [handler], prompt, max_tokens=2)
    assert handler.events == []


async def test_synchronous_handlers_run_off_the_loop_unless_inline():
    class Inline(Recorder):
        run_inline = True

    rig, off, inline, on = fake(), Recorder(), Inline(), AsyncRecorder()
    here = threading.current_thread().name
    async with rig.engine() as engine:
        await told(engine, [off, inline, on], max_tokens=3)
    assert inline.threads == on.threads == {here}
    assert len(off.threads) == 1
    assert off.threads.pop().startswith("asyncllm-callbacks")


async def test_a_slow_handler_leaves_the_loop_and_the_engine_alone():
    entered, gate = threading.Event(), threading.Event()

    class Slow:
        def on_llm_new_token(self, token, **kwargs):
            entered.set()
            assert gate.wait(10)

    async with fake().engine() as engine:
        slow = stream_with_callbacks(engine, [1], handlers=[Slow()], max_tokens=20)
        reading = asyncio.ensure_future(slow.result())
        await until(entered.is_set)
        other = await engine.generate([2], max_tokens=20)
        assert not reading.done()
        gate.set()
        result = await reading
    assert len(other.token_ids) == len(result.token_ids) == 20


async def test_abandoned_call_ends_before_the_next():
    entered, gate, order = threading.Event(), threading.Event(), []

    class Slow:
        def on_llm_new_token(self, token, **kwargs):
            entered.set()
            assert gate.wait(10)
            order.append("token")

        def on_llm_error(self, error, **kwargs):
            order.append("error")

    async with fake().engine() as engine:
        stream = stream_with_callbacks(engine, [1], handlers=[Slow()], max_tokens=20)
        reading = asyncio.ensure_future(stream.result())
        await until(entered.is_set)
        reading.cancel()
        await asyncio.sleep(0.02)
        assert (order, reading.done()) == ([], False)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert order == ["token", "error"]


async def test_context_variables_reach_handlers():
    import contextvars

    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    class Reader:
        def on_llm_start(self, *args, **kwargs):
            seen.append(variable.get())

    async with fake().engine() as engine:
        variable.set("mine")
        await told(engine, [Reader()], max_tokens=1)
    assert seen == ["mine"]


async def test_a_handler_may_run_a_loop_of_its_own_below_any_other():
    completions = []

    class Nested:
        def on_llm_start(self, *args, **kwargs):
            async def generate():
                async with fake().engine() as engine:
                    completions.append(await engine.generate([1], max_tokens=3))

            asyncio.run(generate())

    async def main():
        async with fake().engine() as engine:
            stream = stream_with_callbacks(engine, [1], handlers=[Nested()], max_tokens=2)
            await stream.result()

    for backend in ("asyncio", "trio"):
        thread = threading.Thread(target=anyio.run, args=(main,), kwargs={"backend": backend})
        thread.start()
        await asyncio.to_thread(thread.join)
    assert [len(completion.token_ids) for completion in completions] == [3, 3]


class Faulty(Recorder):
    def __init__(self, event, raise_error=False):
        super().__init__()
        self.raise_error = raise_error

        def fail(*args, **kwargs):
            self._note(event, args, kwargs)
            raise ValueError(f"from {event}")

        setattr(self, event, fail)


@pytest.mark.parametrize("event", ["on_llm_start", "on_llm_new_token"])
async def test_a_handler_that_asks_for_it_stops_the_stream(event):
    rig, handler, other = fake(step_time=0.001), Faulty(event, raise_error=True), Recorder()
    async with rig.engine() as engine:
        stream = stream_with_callbacks(engine, [1], handlers=[handler, other], max_tokens=200)
        with pytest.raises(ValueError, match=event):
            await stream.result()
        assert [delta async for delta in stream] == []
        await until(lambda: engine.stats().num_aborted != 0)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
    for one in (handler, other):
        error, kwargs = one.error
        assert isinstance(error, ValueError)
        assert kwargs["run_id"] == stream.run_id
    assert other.names[-1] == "on_llm_error"


async def test_a_handler_may_refuse_the_end():
    handler = Faulty("on_llm_end", raise_error=True)
    async with fake().engine() as engine:
        with pytest.raises(ValueError, match="on_llm_end"):
            await told(engine, [handler], max_tokens=2)
    assert handler.names == WHOLE


async def test_refused_request_is_announced_and_raised_at_first_read():
    rig, handler = fake(), Recorder()
    async with rig.engine() as engine:
        stream = stream_with_callbacks(engine, "1 2", handlers=[handler], max_tokens=0)
        assert (stream.request_id, stream.usage, stream.finish_reason) == (None, None, None)
        with pytest.raises(InvalidRequestError):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(InvalidRequestError):
            await stream.result()
        bad = stream_with_callbacks(engine, ["a", "b"], handlers=[handler])
        with pytest.raises(InvalidRequestError):
            await bad.result()
    assert handler.names == [
        "on_llm_start",
        "on_llm_error",
        "on_chat_model_start",
        "on_llm_error",
    ]


async def test_failed_request_is_reported_with_partial_output():
    rig, handler = fake(step_time=0.01), Recorder()
    rig.executor.row_errors["bad"] = RuntimeError("row")
    async with rig.engine() as engine:
        with pytest.raises(RequestError):
            await told(engine, [handler], request_id="bad", max_tokens=5)
        with pytest.raises(DeadlineExceededError):
            await told(engine, [handler], timeout=0.1, max_tokens=200)
    first, second = handler.of("on_llm_error")
    assert "response" not in first[1]
    text = "".join(args[0] for args, _ in handler.of("on_llm_new_token"))
    assert second[1]["response"].generations[0][0].text == text != ""


async def test_cancellation_is_an_error_to_handlers():
    rig, handler, other = fake(step_time=0.01), Recorder(), AsyncRecorder()
    async with rig.engine() as engine:
        stream = stream_with_callbacks(engine, [1], handlers=[handler, other], max_tokens=200)
        task = asyncio.ensure_future(stream.result())
        await until(lambda: other.of("on_llm_new_token"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.stats().num_aborted != 0)
    for one in (handler, other):
        error, kwargs = one.error
        assert isinstance(error, asyncio.CancelledError)
        assert kwargs["response"].generations[0][0].text


async def test_closing_and_aborting_end_the_run():
    rig, closed, aborted, unread = fake(step_time=0.001), Recorder(), Recorder(), Recorder()
    async with rig.engine() as engine:
        async with stream_with_callbacks(engine, [1], handlers=[closed], max_tokens=200) as one:
            first = await anext(one)
        assert [delta async for delta in one] == []
        two = stream_with_callbacks(engine, [1], handlers=[aborted], max_tokens=200)
        await anext(two)
        two.abort()
        assert (await two.result()).finish_reason == two.finish_reason == "abort"
        three = stream_with_callbacks(engine, [1], handlers=[unread], max_tokens=200)
        await three.aclose()
        await three.aclose()
        four = stream_with_callbacks(engine, [1], handlers=[unread], max_tokens=200)
        del four
        gc.collect()
        await until(lambda: engine.stats().num_aborted >= 4)
    assert closed.names == aborted.names == WHOLE
    assert closed.of("on_llm_end")[0][0][0].generations[0][0].text == first.text
    result = aborted.of("on_llm_end")[0][0][0]
    assert result.generations[0][0].generation_info["finish_reason"] == "abort"
    assert unread.events == []


def _run_on_trio(main):
    import trio

    trio.run(main)


async def test_works_under_trio():
    import trio

    handler, cancelled, other = Recorder(), Recorder(), AsyncRecorder()

    async def main():
        async with fake(step_time=0.001).engine() as engine:
            await told(engine, [handler], max_tokens=4)
            with trio.CancelScope() as scope:
                stream = stream_with_callbacks(
                    engine, [1], handlers=[cancelled, other], max_tokens=200
                )
                async for _ in stream:
                    scope.cancel()

    await asyncio.to_thread(_run_on_trio, main)
    assert handler.names == WHOLE
    for one in (cancelled, other):
        assert isinstance(one.error[0], trio.Cancelled)


async def test_on_llm_error_may_await_in_cancelled_anyio_scope():
    """It cancels again at each of them, on asyncio too."""

    class Awaiting(AsyncRecorder):
        async def on_llm_error(self, *args, **kwargs):
            await anyio.sleep(0.001)
            await super().on_llm_error(*args, **kwargs)

    handler = Awaiting()
    async with fake(step_time=0.001).engine() as engine:
        with anyio.CancelScope() as scope:
            async for _ in stream_with_callbacks(engine, [1], handlers=[handler], max_tokens=200):
                scope.cancel()
    assert isinstance(handler.error[0], asyncio.CancelledError)


async def test_destroyed_read_awaits_no_handler():
    handler = AsyncRecorder()
    async with fake().engine() as engine:
        await engine.pause()
        stream = stream_with_callbacks(engine, [1], handlers=[handler], max_tokens=2)
        read = stream.__anext__()
        read.send(None)
        read.close()  # as the collector does with a task of a loop that was closed
        assert handler.names == ["on_llm_start"]
        await engine.resume()


@pytest.fixture
def tracer_class():
    tracers = pytest.importorskip("langchain_core.tracers.base")

    class Tracer(tracers.BaseTracer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.runs = []

        def _persist_run(self, run):
            self.runs.append(run)

    return Tracer


@pytest.mark.parametrize("schema", ["original", "original+chat"])
async def test_langchain_tracers_accept_a_run(tracer_class, schema):
    tracer = tracer_class(_schema_format=schema)
    async with fake().engine() as engine:
        text = await told(engine, [tracer], "1 2", tags=["t"], metadata={"m": 1}, max_tokens=4)
        chat = await told(engine, [tracer], CHAT, max_tokens=4)
    first, second = tracer.runs
    assert first.inputs == {"prompts": ["1 2"]}
    assert first.outputs["generations"][0][0]["text"] == text.text
    assert first.tags == ["t"]
    assert first.extra["metadata"]["m"] == 1
    assert [event["name"] for event in first.events][0 :: len(first.events) - 1] == ["start", "end"]
    assert second.outputs["generations"][0][0]["text"] == chat.text
    assert ("messages" in second.inputs) == (schema == "original+chat")
    assert first.error is second.error is None


async def test_langchain_tracers_accept_an_error(tracer_class):
    tracer = tracer_class()
    async with fake(step_time=0.01).engine() as engine:
        with pytest.raises(DeadlineExceededError):
            await told(engine, [tracer], "1 2", timeout=0.1, max_tokens=200)
    (run,) = tracer.runs
    assert "DeadlineExceededError" in run.error
    assert run.outputs["generations"][0][0]["text"]


class Raising:
    """Raises in one of its methods; on the thread, inline, or asynchronously."""

    def __init__(self, event, error, how, **attributes):
        self.__dict__.update(attributes, calls=0, run_inline=how == "inline")

        def fail(*args, **kwargs):
            self.calls += 1
            raise error

        async def fail_later(*args, **kwargs):
            await anyio.lowlevel.checkpoint()
            fail()

        setattr(self, event, fail_later if how == "async" else fail)


HOWS = ["thread", "inline", "async"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("event", WHOLE)
@pytest.mark.parametrize(
    "kind", [ValueError, SystemExit, asyncio.CancelledError, GeneratorExit, StopAsyncIteration]
)
async def test_any_error_of_a_handler_is_logged_and_no_more(kind, event, how, caplog):
    rig, handler, other = fake(), Raising(event, kind("own"), how), Recorder()
    async with rig.engine() as engine:
        with caplog.at_level(logging.WARNING, logger="asyncllm.callbacks"):
            completion = await told(engine, [handler, other], max_tokens=4)
            assert len(completion.token_ids) == 4
    assert handler.calls > 0
    assert other.names == WHOLE
    assert f"Raising.{event} raised" in caplog.text


async def test_handler_errors_under_trio_are_only_logged():
    async def main():
        async with fake().engine() as engine:
            for kind in (SystemExit, asyncio.CancelledError, GeneratorExit):
                for how in HOWS:
                    handler = Raising("on_llm_new_token", kind("own"), how)
                    completion = await told(engine, [handler], max_tokens=4)
                    assert len(completion.token_ids) == 4
                    assert handler.calls > 0

    await asyncio.to_thread(_run_on_trio, main)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [StopAsyncIteration, StopIteration])
async def test_stop_iteration_of_a_handler_does_not_end_stream(kind, how):
    handler = Raising("on_llm_new_token", kind("own"), how, raise_error=True)
    async with fake().engine() as engine:
        with pytest.raises(RuntimeError, match=kind.__name__):
            await told(engine, [handler], max_tokens=4)


async def test_a_handler_does_not_replace_the_exception_on_its_way():
    handler = Raising("on_llm_error", SystemExit("own"), "thread", raise_error=True)
    async with fake().engine() as engine:
        with pytest.raises(InvalidRequestError):
            await told(engine, [handler], n=0)
    assert handler.calls == 1


@pytest.mark.parametrize("how", ["task", "scope", "timeout"])
async def test_a_cancellation_within_a_handler_cancels_the_reader(how):
    class Waiting:
        async def on_llm_new_token(self, *args, **kwargs):
            later = {
                "task": task.cancel,
                "scope": scope.cancel,
                "timeout": lambda: timeout.reschedule(0),
            }
            asyncio.get_running_loop().call_soon(later[how])
            await asyncio.sleep(3600)

    async def read():
        nonlocal scope, timeout
        with anyio.CancelScope() as scope:
            async with asyncio.timeout(None) as timeout:
                await told(engine, [Waiting()])

    scope = timeout = None
    async with fake().engine() as engine:
        task = asyncio.ensure_future(read())
        (found,) = await asyncio.gather(task, return_exceptions=True)
    expected = {"task": asyncio.CancelledError, "scope": type(None), "timeout": TimeoutError}
    assert type(found) is expected[how]
    assert scope.cancel_called == (how == "scope")


async def test_a_handler_whose_attributes_raise():
    class Odd:
        def __getattr__(self, name):
            raise ValueError(name)

        def on_llm_end(self, *args, **kwargs):
            ended.append(1)

    ended = []
    async with fake().engine() as engine:
        result = await told(engine, [Odd()], max_tokens=4)
    assert (len(result.token_ids), ended) == (4, [1])


async def test_a_refused_prompt_of_any_size_is_described():
    async with fake().engine() as engine:
        for prompt in ([10**5000], range(10**12)):
            handler = Recorder()
            with pytest.raises((InvalidRequestError, ContextLengthExceededError)):
                await told(engine, [handler], prompt)
            assert handler.names == ["on_llm_start", "on_llm_error"]
