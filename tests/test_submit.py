"""submit(): waiting for a place in a full queue, in order."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import pytest

from asyncllm import (
    ContextLengthExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
)
from asyncllm.core import waiting_texts
from asyncllm.core.request import Request
from tests.event_loops import run as run  # a fixture
from tests.fakes import entered, fake, fake_group
from tests.idle import until


def in_line(engine):
    return len(engine._thread.core.admission.caller_queue)


def nothing_left(engine):
    stats, admission = engine.stats(), engine._thread.core.admission
    return (
        stats.num_running == stats.num_waiting == stats.num_paused == 0
        and stats.num_free_blocks == stats.num_blocks
        and len(admission.queued_requests)
        == admission.num_queued_tokens
        == len(admission.caller_queue)
        == 0
    )


def test_a_batch_may_be_larger_than_the_queue(run):
    rig = fake(max_num_seqs=2, record=True)

    async def main():
        found = {}

        async def one(engine, token):
            stream = await engine.submit([token], max_tokens=3)
            found[token] = list((await stream.result()).token_ids)

        async with rig.engine(max_queued_requests=3) as engine:
            async with anyio.create_task_group() as tasks:
                for token in range(60):
                    tasks.start_soon(one, engine, token)
            await until(lambda: nothing_left(engine))
            stats = engine.stats()
            assert (stats.num_requests, stats.num_finished, stats.num_rejected) == (60, 60, 0)
        assert found == {token: rig.executor.reference([token], 3) for token in range(60)}

    run(main)


class Full:
    """An engine whose queue of two is full, and which is paused."""

    def __init__(self, **settings):
        self.rig = fake(max_num_seqs=1, record=True)
        self.engine = self.rig.engine(max_queued_requests=2, **settings)

    async def __aenter__(self):
        await self.engine.start()
        await self.engine.pause()
        self.held = [self.engine.stream([i], max_tokens=2) for i in range(2)]
        return self

    async def __aexit__(self, *exc_info):
        await self.engine.aclose()

    async def submit(self, *args, **options):
        """A task in line behind the others."""
        before = in_line(self.engine)
        task = asyncio.create_task(self.engine.submit(*args, **options))
        await until(lambda: task.done() or in_line(self.engine) == before + 1)
        return task

    async def run_on(self):
        await self.engine.resume()
        for stream in self.held:
            await stream.result()


async def test_places_go_to_those_in_line_in_their_order():
    async with Full() as full:
        tasks = [await full.submit([token], max_tokens=2) for token in (10, 11, 12, 13)]
        with pytest.raises(EngineOverloadedError, match="4 wait for a place in the queue"):
            full.engine.stream([99])
        # One that needs more places than become free at a time is not passed by others.
        wide = await full.submit([14], n=2, max_tokens=2)
        last = await full.submit([15], max_tokens=2)
        await full.run_on()
        for task in (*tasks, wide, last):
            await (await task).result()
        assert entered(full.rig) == [0, 1, 10, 11, 12, 13, 14, 14, 15]
        assert full.engine.stats().num_rejected == 1


async def test_waiting_line_comes_before_stream():
    async with Full(max_queued_tokens=20) as full:
        large = await full.submit([5] * 20, max_tokens=1)
        full.held.pop().abort()
        await until(lambda: full.engine.stats().num_waiting == 1)
        assert in_line(full.engine) == 1
        with pytest.raises(EngineOverloadedError, match="1 wait for a place in the queue"):
            full.engine.stream([1])
        await full.run_on()
        assert len((await (await large).result()).prompt_token_ids) == 20
        assert len((await full.engine.generate([1], max_tokens=1)).token_ids) == 1


async def test_one_place_wakes_one():
    async with Full() as full:
        tasks = [await full.submit([token]) for token in range(5)]
        full.held[0].abort()
        await until(lambda: in_line(full.engine) == 4)
        await asyncio.sleep(0.02)
        assert [task.done() for task in tasks] == [True, False, False, False, False]
        for task in tasks:
            task.cancel()


async def test_a_cancelled_wait_leaves_nothing():
    seen = []

    class Watch:
        def on_submit(self, request, submission):
            seen.append(request.token_ids[0])

        def on_finish(self, request, usage, error): ...

    async with Full() as full:
        full.engine.add_observer(Watch())
        first, second, third = [await full.submit([token], max_tokens=2) for token in (7, 8, 9)]
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await until(lambda: in_line(full.engine) == 2)
        await full.run_on()
        for task in (first, third):
            await (await task).result()
        await until(lambda: nothing_left(full.engine))
        stats = full.engine.stats()
        assert (stats.num_requests, stats.num_finished, stats.num_aborted) == (4, 4, 0)
        assert entered(full.rig) == [0, 1, 7, 9]
        assert seen == [7, 9]


async def test_cancelled_when_its_place_is_there_already():
    async with Full() as full:
        first, second = [await full.submit([token], max_tokens=2) for token in (7, 8)]
        full.held[0].abort()
        while in_line(full.engine) == 2:
            time.sleep(0.001)  # the loop does not hear of the place
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await full.run_on()
        await (await second).result()
        await until(lambda: nothing_left(full.engine))
        assert entered(full.rig) == [1, 8]


async def test_dropped_unread_stream_frees_its_place():
    async with Full() as full:
        task = await full.submit([7])
        full.held[0].abort()
        await task
        del task
        await full.run_on()
        await until(lambda: nothing_left(full.engine))


async def test_closing_tells_those_in_line_at_once():
    async with Full() as full:
        task = await full.submit([7])
        full.rig.executor.gate = threading.Semaphore(0)
        closing = asyncio.create_task(full.engine.aclose(drain=None))
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            await task
        assert not closing.done()
        full.rig.executor.gate.release(100)
        await closing
        for stream in full.held:
            assert (await stream.result()).finish_reason == "length"
        with pytest.raises(EngineClosedError):
            await full.engine.submit([1])


async def test_death_tells_those_in_line():
    async with Full() as full:
        tasks = [await full.submit([token]) for token in (7, 8)]
        full.rig.executor.faults[0] = OSError("the device is gone")
        await full.engine.resume()
        for task in tasks:
            with pytest.raises(EngineDeadError) as caught:
                stream = await task  # the first may have got its place before
                await stream.result()
            assert isinstance(caught.value.__cause__, OSError)


async def test_paused_engine_starts_deadline_with_the_place():
    async with Full() as full:
        task = await full.submit([7], max_tokens=2, timeout=0.25)
        await asyncio.sleep(0.3)
        assert not task.done()
        await full.run_on()
        done = await (await task).result()
        assert done.usage.queue_time < 0.2
        assert done.usage.total_time < 0.25


async def test_unservable_requests_are_refused_before_waiting():
    async with Full() as full:
        for prompt, options, error in (
            ([], {}, InvalidRequestError),
            ([1], {"temperature": -1}, InvalidRequestError),
            ([1], {"n": 3}, InvalidRequestError),
            ([1], {"tools": []}, InvalidRequestError),
            ([{"role": "user", "content": "1"}], {"tool_choice": 7}, InvalidRequestError),
            ([1] * 500, {}, ContextLengthExceededError),
            ([1], {"request_id": full.held[0].request_id}, InvalidRequestError),
        ):
            with pytest.raises(error):
                await full.engine.submit(prompt, **options)
        assert in_line(full.engine) == 0
        twins = [await full.submit([7], request_id="x", max_tokens=2) for _ in range(2)]
        await full.engine.resume()
        await until(twins[1].done)
        with pytest.raises(InvalidRequestError, match="a live request has this id"):
            await twins[1]
        assert (await twins[0]).request_id == "x"


async def test_messages_and_long_texts_wait_too():
    async with Full(max_queued_tokens=10_000) as full:
        chat = await full.submit([{"role": "user", "content": "3 4"}], max_tokens=2)
        long = await full.submit("5 " * 3000, max_tokens=2, truncate_prompt_tokens=100)
        await full.run_on()
        assert (await (await chat).result()).prompt_token_ids == (3, 4)
        assert (await (await long).result()).prompt_token_ids == (5,) * 100


async def test_closed_loop_delays_nobody():
    async with Full() as full:

        def abandoned():
            loop = asyncio.new_event_loop()
            task = loop.create_task(full.engine.submit([7]))
            while in_line(full.engine) == 0:
                loop.run_until_complete(asyncio.sleep(0.001))
            loop.close()
            task._log_destroy_pending = False

        await anyio.to_thread.run_sync(abandoned)
        task = await full.submit([8], max_tokens=2)
        await full.run_on()
        assert len((await (await task).result()).token_ids) == 2
        await until(lambda: nothing_left(full.engine))


async def test_seeds_are_drawn_in_the_order_of_the_calls():
    seeds = {}
    for places in (2, 100):
        drawn = seeds.setdefault(places, {})

        class Watch:
            def __init__(self, drawn):
                self.drawn = drawn

            def on_submit(self, request, submission):
                self.drawn[request.token_ids[0]] = request.sampling.seed

            def on_finish(self, request, usage, error): ...

        rig = fake(max_num_seqs=1)
        async with rig.engine(max_queued_requests=places, seed=5) as engine:
            engine.add_observer(Watch(drawn))
            calls = [engine.submit([token], max_tokens=1) for token in range(10)]
            for stream in await asyncio.gather(*calls):
                await stream.result()
    assert seeds[2] == seeds[100]
    assert len(set(seeds[2].values())) == 10


async def test_the_engine_thread_cannot_wait_for_a_place():
    told = []

    class Watch:
        def on_submit(self, request, submission): ...

        def on_finish(self, request, usage, error):
            if not told:
                told.append(None)
                with pytest.raises(RuntimeError, match="cannot wait for the engine") as caught:
                    asyncio.run(full.engine.submit([1]))
                told.append(caught.value)

    async with Full() as full:
        full.held.pop().abort()
        await until(lambda: full.engine.stats().num_waiting == 1)
        full.engine.add_observer(Watch())
        full.held.append(full.engine.stream([2], max_tokens=2))
        waiting = [await full.submit([token], max_tokens=2) for token in (7, 8)]
        await full.run_on()
        for task in waiting:
            await (await task).result()
        await until(lambda: nothing_left(full.engine))
    assert len(told) == 2


@pytest.mark.parametrize("is_group", [False, True])
async def test_a_text_that_waits_for_room_holds_up_no_short_prompt(is_group, monkeypatch):
    monkeypatch.setattr(waiting_texts, "MAX_WAITING_TEXT_BYTES", 100_000)
    rig, gate = fake_group(2) if is_group else fake(), threading.Event()
    for one in rig.rigs if is_group else [rig]:
        one.tokenizer.gate = gate
    text, options = "7 " * 20_000, {"max_tokens": 1, "truncate_prompt_tokens": 3}
    async with rig.engine() as engine:
        streams = [engine.stream(text, **options) for _ in range(4 if is_group else 2)]
        with pytest.raises(EngineOverloadedError):
            engine.stream(text, **options)
        queue = engine._queue if is_group else engine._thread.core.admission
        waiting = [asyncio.create_task(engine.submit(text, **options)) for _ in range(3)]
        await until(lambda: len(queue.caller_queue) == 3)
        for _ in range(3):
            assert (await engine.generate([1], max_tokens=1)).finish_reason == "length"
            assert (await (await engine.submit([1], max_tokens=1)).result()).finish_reason
        assert not any(task.done() for task in waiting)
        gate.set()
        streams += await asyncio.gather(*waiting)
        assert [(await stream.result()).prompt_token_ids for stream in streams] == (
            [(7, 7, 7)] * len(streams)
        )


@pytest.mark.parametrize("is_group", [False, True])
async def test_a_refused_request_for_many_outputs_makes_only_its_first(is_group, monkeypatch):
    made = []

    def note_index(request):
        initialise(request)
        made.extend([request.index] * (request.index > 0))

    initialise = Request.__post_init__
    monkeypatch.setattr(Request, "__post_init__", note_index)
    rig = fake_group(2) if is_group else fake()
    async with rig.engine(max_queued_requests=20) as engine:
        await engine.pause()
        stream = engine.stream([1, 2], n=15, max_tokens=2, request_id="taken")
        others = [engine.stream([1, 2], n=15, max_tokens=2)] if is_group else []
        assert made == [*range(1, 15)] * (1 + len(others))
        made.clear()
        refused = [
            ([1, 2], {}, EngineOverloadedError),
            ([1, 2], {"request_id": "taken", "n": 2}, InvalidRequestError),
            ([1, 2], {"n": 21}, InvalidRequestError),
            ([1, -2], {"n": 2}, InvalidRequestError),
            ([1, 10**6], {"n": 2}, InvalidRequestError),
            ([1] * 10**5, {"n": 2}, ContextLengthExceededError),
        ]
        for prompt, fields, error in refused:
            with pytest.raises(error):
                engine.stream(prompt, **{"n": 15, "max_tokens": 2} | fields)
        assert made == []
        assert engine.stats().num_rejected == (not is_group)
        waiting = asyncio.create_task(engine.submit([1, 2], n=6, max_tokens=2))
        queue = engine._queue if is_group else engine._thread.core.admission
        await until(lambda: len(queue.caller_queue) == 1)
        assert made == [*range(1, 6)]
        await engine.resume()
        for one in (stream, *others, await waiting):
            outputs = (await one.result()).outputs
            assert [output.index for output in outputs] == [*range(one.num_outputs)]
            assert {len(output.token_ids) for output in outputs} == {2}
