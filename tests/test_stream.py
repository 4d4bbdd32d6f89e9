"""The streaming contract: ways out, slow readers, deadlines, faults. On the fake executor.

Each test holds the executor back with a gate or a slow step where it needs a moment to be
hit, and afterwards asks the engine itself whether everything was given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import pickle
import random
import threading
import time
import weakref

import pytest

from asyncllm import (
    DeadlineExceededError,
    EngineDeadError,
    RequestError,
)
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.outputs import Delta, Logprob, TokenLogprobs, make_token_delta
from tests.fakes import channel_of, core_of, entered, fake, mailbox_of_this_loop
from tests.idle import all_free, blocking_until, until
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("quick_collections")


@contextlib.asynccontextmanager
async def engine_of(rig, **overrides):
    """An engine whose loop may complain about nothing, checked at the end."""
    complaints = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    async with rig.engine(**overrides) as engine:
        yield engine
        await all_free(engine)
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


# --- ways out ---------------------------------------------------------------------------


async def way_break(engine):
    async for _ in engine.stream([1, 2], request_id="x", max_tokens=200):
        break


async def way_exception_in_the_body(engine):
    with contextlib.suppress(KeyError):
        async for _ in engine.stream([1, 2], request_id="x", max_tokens=200):
            raise KeyError("body")


async def way_exception_while_held_in_a_traceback(engine):
    kept = None
    try:
        stream = engine.stream([1, 2], request_id="x", max_tokens=200)
        async for _ in stream:
            raise KeyError("body")
    except KeyError as error:
        kept = error
    # The traceback keeps this frame and so the stream, which runs on: it is still ours.
    assert kept is not None
    stream.abort()


async def way_cancelled_task(engine):
    async def read():
        async for _ in engine.stream([1, 2], request_id="x", max_tokens=200):
            pass

    task = asyncio.ensure_future(read())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def way_cancelled_read_of_a_held_stream(engine):
    stream = engine.stream([1, 2], request_id="x", max_tokens=200)
    await anext(stream)
    read = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    read.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await read
        stream.abort()  # the delta was there already: the read was not pending
    return stream


async def way_timeout(engine):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.generate([1, 2], request_id="x", max_tokens=200)


async def way_aclose(engine):
    stream = engine.stream([1, 2], request_id="x", max_tokens=200)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    return stream


async def way_async_with(engine):
    async with engine.stream([1, 2], request_id="x", max_tokens=200) as stream:
        await anext(stream)
    return stream


async def way_last_reference(engine):
    stream = engine.stream([1, 2], request_id="x", max_tokens=200)
    await anext(stream)
    del stream


async def way_reference_cycle(engine):
    cycle = [engine.stream([1, 2], request_id="x", max_tokens=200)]
    cycle.append(cycle)
    del cycle
    gc.collect()


async def way_abort_by_id(engine):
    stream = engine.stream([1, 2], request_id="x", max_tokens=200)
    engine.abort("x")
    engine.abort(["x", "unknown"])
    assert [d async for d in stream][-1].finish_reason == "abort"


async def way_abort_from_a_thread(engine):
    stream = engine.stream([1, 2], request_id="x", max_tokens=200)
    await anext(stream)
    await asyncio.to_thread(engine.abort, "x")
    assert [d async for d in stream][-1].finish_reason == "abort"


async def way_abort_from_another_loop(engine):
    stream = engine.stream([1, 2], request_id="x", max_tokens=200)

    async def elsewhere():
        engine.abort("x")

    await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
    assert [d async for d in stream][-1].finish_reason == "abort"


async def way_never_read(engine):
    engine.stream([1, 2], request_id="x", max_tokens=200)


WAYS = {name: way for name, way in globals().items() if name.startswith("way_")}


@pytest.mark.parametrize("depth", slow_but([1, 2], 2))
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_every_way_out_gives_everything_back(way, depth):
    rig = fake(step_time=0.001, pipeline_depth=depth)
    async with engine_of(rig) as engine:
        bystander = engine.stream([7], max_tokens=100)
        held = await way(engine)
        # The id is free at once, and its blocks before the next step is scheduled.
        again = engine.stream([3], request_id="x", max_tokens=4)
        assert list((await again.result()).token_ids) == rig.executor.reference([3], 4)
        assert list((await bystander.result()).token_ids) == rig.executor.reference([7], 100)
        assert engine.stats().num_aborted == 1
        assert engine.stats().generation_tokens < 100 + 4 + 200
        del held


@pytest.mark.parametrize("seed", slow_but(range(12), *range(4)))
async def test_cancellation_at_any_await_point(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    rig = fake(step_time=0.0005, pipeline_depth=rng.choice([1, 2]), num_blocks=20)
    async with engine_of(rig) as engine:

        async def read(i):
            got = []
            async for delta in engine.stream([i], max_tokens=40):
                got += delta.token_ids
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            return i, got

        tasks = [asyncio.ensure_future(read(i)) for i in range(20)]
        for task in tasks:
            if rng.random() < 0.5:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(rng.random() * 0.002)
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                i, got = outcome
                assert got == rig.executor.reference([i], 40)


async def test_aborted_queued_request_is_never_prefilled():
    rig = fake(max_num_seqs=1, step_time=0.002, record=True)
    async with engine_of(rig) as engine:
        running = engine.stream([1], max_tokens=20)
        await anext(running)
        queued = engine.stream([2], request_id="q", max_tokens=5)
        engine.abort("q")
        result = await queued.result()
        assert (result.finish_reason, result.token_ids) == ("abort", ())
        await running.result()
    assert entered(rig) == [1]


@pytest.mark.parametrize("depth", [1, 2])
async def test_blocks_are_free_when_the_abort_is_drained(depth):
    """No step is needed: while the device hangs in one, only the drain is waited for."""
    rig = fake(pipeline_depth=depth, gate=0)
    async with engine_of(rig) as engine:
        stream = engine.stream([1] * 20, max_tokens=50)
        rig.executor.gate.release(3)
        await anext(stream)
        await until(lambda: engine.stats().num_free_blocks < 64)
        stream.abort()
        rig.executor.gate.release(2)  # what is in flight ends, and nothing more is launched
        await until(lambda: engine.stats().num_free_blocks == 64)
        rig.executor.gate.release(100)


async def test_stream_held_in_a_variable_runs_on_after_break():
    rig = fake(step_time=0.0005)
    async with engine_of(rig) as engine:
        stream = engine.stream([5], max_tokens=30)
        got = []
        async for delta in stream:
            got += delta.token_ids
            break
        await asyncio.sleep(0.005)
        async for delta in stream:
            got += delta.token_ids
        assert got == rig.executor.reference([5], 30)


async def test_destructor_on_a_foreign_thread():
    async with engine_of(fake(step_time=0.001)) as engine:
        box = [engine.stream([1], max_tokens=200)]
        await anext(box[0])
        thread = threading.Thread(target=box.clear)
        thread.start()
        await asyncio.to_thread(thread.join)
        await all_free(engine)
        assert engine.stats().num_aborted == 1


async def test_destructor_inside_the_queues_own_put():
    """The collector may run a stream's destructor in the middle of another put: its own put
    must go through, or the thread would deadlock with itself."""
    rig = fake(step_time=0.001)
    async with engine_of(rig) as engine:
        core = core_of(engine)
        doomed = [engine.stream([i], max_tokens=100) for i in range(3)]
        inbox = core.inbox

        class CollectingQueue:
            get, get_nowait = inbox.get, inbox.get_nowait

            def put(self, item):
                doomed.clear()
                inbox.put(item)

        core.inbox = CollectingQueue()
        result = await engine.generate([9], max_tokens=3)
        core.inbox = inbox
        assert list(result.token_ids) == rig.executor.reference([9], 3)
        await all_free(engine)
        assert engine.stats().num_aborted == 3


async def test_second_reader_and_second_loop_are_clear_errors():
    async with engine_of(fake(step_time=0.002)) as engine:
        stream = engine.stream([1], max_tokens=60)
        reader = asyncio.ensure_future(stream.result())
        await asyncio.sleep(0.003)
        with pytest.raises(RuntimeError, match="read by another task"):
            await anext(stream)

        async def elsewhere():
            with pytest.raises(RuntimeError, match="event loop that read it first"):
                await other.result()

        other = engine.stream([1], max_tokens=60)
        await anext(other)
        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        # The wrong readers were told so, and both streams are unharmed.
        for result in (await reader, await other.result()):
            assert len(result.token_ids) == 60


# --- slow readers -----------------------------------------------------------------------


async def test_output_merges_behind_a_stalled_loop():
    """20,160 tokens of 32 streams, half of which are being waited for: what is kept grows by a
    delta for each ``max_unread`` tokens and a wake for each reader, not with every token."""
    rig = fake(num_blocks=32 * 40 + 1, block_size=16, max_model_len=640, max_num_seqs=32, gate=0)
    async with engine_of(rig) as engine:
        streams = [engine.stream([i], max_tokens=630, max_unread=50) for i in range(32)]
        first = [asyncio.ensure_future(anext(stream)) for stream in streams[:16]]
        await asyncio.sleep(0)
        rig.executor.gate.release(1000)
        blocking_until(lambda: all(channel_of(stream).ended for stream in streams), 30.0)
        assert [len(channel_of(stream).items) for stream in streams] == [13] * 32
        # A wake for the first token, and one for the end.
        assert len(mailbox_of_this_loop(engine)._channels_to_wake) <= 2 * len(first)
        deltas = [[await read] for read in first] + [[] for _ in streams[16:]]
        for i, stream in enumerate(streams):
            deltas[i] += [delta async for delta in stream]
            tokens = [token for delta in deltas[i] for token in delta.token_ids]
            assert tokens == rig.executor.reference([i], 630)
            assert "".join(map(str, deltas[i])) == "".join(f"{token} " for token in tokens)
            assert [len(delta.token_ids) for delta in deltas[i]] == [50] * 12 + [30]
            assert deltas[i][-1].finish_reason == "length"


async def test_paused_request_continues_where_it_was():
    rig = fake(max_num_seqs=1)
    async with engine_of(rig) as engine:
        stream = engine.stream([2], max_tokens=100, max_unread=10, on_slow="pause")
        await until(lambda: engine.stats().num_paused == 1)
        # It holds no slot: others run. It holds its KV, and memory stays bounded.
        other = await engine.generate([3], max_tokens=20)
        assert list(other.token_ids) == rig.executor.reference([3], 20)
        assert channel_of(stream).num_unread == 10
        assert engine.stats().num_free_blocks < 64
        assert engine.stats().num_preemptions == 0
        got = []
        async for delta in stream:
            got += delta.token_ids
            assert len(delta.token_ids) == 1
            assert channel_of(stream).num_unread <= 10
        assert got == rig.executor.reference([2], 100)


async def test_stalled_readers_do_not_hold_up_a_live_one():
    rig = fake(num_blocks=200, max_num_seqs=32)
    async with engine_of(rig) as engine:
        stalled = [
            engine.stream([i], max_tokens=300, on_slow=mode, max_unread=8)
            for i in range(6)
            for mode in ("coalesce", "pause", "abort")
        ]
        live = await engine.generate([50], max_tokens=100)
        assert list(live.token_ids) == rig.executor.reference([50], 100)
        await until(lambda: engine.stats().num_aborted == 6)
        result = await stalled[2].result()
        assert (result.finish_reason, len(result.token_ids)) == ("abort", 8)
        for stream in stalled:
            await stream.aclose()


@pytest.mark.parametrize("drain", slow_but([None, 60.0], 60.0))
async def test_drain_does_not_wait_for_unread_paused_stream(drain):
    engine = fake().engine()
    await engine.start()
    stream = engine.stream([2], max_tokens=100, max_unread=4, on_slow="pause")
    await until(lambda: engine.stats().num_paused == 1)
    await engine.aclose(drain=drain)
    assert (await stream.result()).finish_reason == "abort"


# --- deadlines --------------------------------------------------------------------------


async def test_deadline_in_the_queue_refuses_without_a_prefill():
    rig = fake(max_num_seqs=1, step_time=0.002, record=True)
    async with engine_of(rig) as engine:
        running = engine.stream([1], max_tokens=30)
        queued = engine.stream([2], timeout=0.01)
        with pytest.raises(DeadlineExceededError, match="waiting") as caught:
            await queued.result()
        assert caught.value.partial is None
        assert isinstance(caught.value, TimeoutError)
        await running.result()
    assert entered(rig) == [1]


async def test_deadline_in_decode_has_partial_output():
    rig = fake(step_time=0.002)
    async with engine_of(rig) as engine:
        stream = engine.stream([1], timeout=0.03, max_tokens=200)
        got = []
        with pytest.raises(DeadlineExceededError) as caught:
            async for delta in stream:
                got += delta.token_ids
        partial = caught.value.partial
        assert got == list(partial.token_ids) == rig.executor.reference([1], len(got))
        assert partial.text == "".join(f"{t} " for t in got)
        assert 0 < len(got) < 200


async def test_deadline_runs_during_prefill_pause_and_tokenisation():
    rig = fake(num_blocks=3001, max_num_batched_tokens=2, step_time=0.002)
    async with engine_of(rig) as engine:
        with pytest.raises(DeadlineExceededError, match="running") as caught:
            await engine.generate([1] * 100, timeout=0.02)
        assert caught.value.partial is None
        paused = engine.stream([1], timeout=0.1, max_unread=2, on_slow="pause", max_tokens=50)
        await until(lambda: engine.stats().num_failed == 2)
        with pytest.raises(DeadlineExceededError, match="paused"):
            await paused.result()
        rig.tokenizer.gate = threading.Event()
        with pytest.raises(DeadlineExceededError, match="tokenised"):
            await engine.stream("5 " * 3000, timeout=0.03).result()
        rig.tokenizer.gate.set()
        await engine.pause()
        with pytest.raises(DeadlineExceededError):
            await engine.generate([1], timeout=0.02)
        await engine.resume()


# --- faults -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
async def test_garbage_from_the_executor_is_fatal(depth):
    rig = fake(pipeline_depth=depth)

    def garbage(result):
        result.token_ids[0] = 10**6
        return result

    rig.executor.faults[2] = garbage
    async with rig.engine() as engine:
        with pytest.raises(EngineDeadError, match="sampled token 1000000"):
            await engine.generate([1], max_tokens=50)


@pytest.mark.parametrize("depth", [1, 2])
async def test_step_out_of_memory_is_retried_smaller(depth):
    rig = fake(pipeline_depth=depth, num_blocks=200, max_num_batched_tokens=64)
    for step in (0, 1, 5, 6):
        rig.executor.faults[step] = StepOutOfMemoryError("out of memory")
    async with engine_of(rig) as engine:
        await engine.pause()
        streams = [engine.stream([i] * 30, max_tokens=10) for i in range(8)]
        await engine.resume()
        for i, stream in enumerate(streams):
            result = await stream.result()
            assert list(result.token_ids) == rig.executor.reference([i] * 30, 10)
    # At depth 2 the step behind a failed one is void as well, and never collected.
    assert {0, 5}.isdisjoint(rig.executor.faults)


async def test_aborted_stream_with_reused_id_ends_with_engine():
    rig = fake(num_blocks=3001)
    rig.tokenizer.gate = threading.Event()
    async with rig.engine() as engine:
        core = core_of(engine)
        # The abort's own command is lost in the death of the engine.
        first = engine.stream("5 " * 3000, request_id="x")
        first._group.cancelled = True
        second = engine.stream([1], request_id="x", max_tokens=200)
        rig.executor.faults |= {i: OSError("gone") for i in range(300)}
        for stream in (second, first):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(stream.result(), 5)
        assert core.admission.num_live_requests == 0
        rig.tokenizer.gate.set()


async def test_hung_step_is_noticed_and_named():
    rig = fake(gate=2)
    engine = rig.engine(step_timeout=0.1)
    await engine.start()
    stream = engine.stream([1], max_tokens=50)
    with pytest.raises(EngineDeadError, match=r"step_timeout=0.1.*'asyncllm-engine'"):
        await stream.result()
    with pytest.raises(EngineDeadError):
        engine.stream([1])
    began = time.monotonic()
    await engine.aclose()
    assert time.monotonic() - began < 5
    rig.executor.gate.release(100)


async def test_hang_after_out_of_memory_is_noticed(monkeypatch):
    rig = fake()
    gate = threading.Event()
    monkeypatch.setattr(rig.executor, "discard", lambda: gate.wait(30))
    rig.executor.faults[1] = StepOutOfMemoryError("out of memory")
    engine = rig.engine(step_timeout=0.1)
    await engine.start()
    with pytest.raises(EngineDeadError, match=r"step_timeout=0.1"):
        await asyncio.wait_for(engine.generate([1], max_tokens=50), 10)
    await engine.aclose()
    gate.set()


async def test_aborts_of_finished_and_unknown_ids_change_nothing():
    async with engine_of(fake()) as engine:
        stream = engine.stream([1], max_tokens=3, request_id="a")
        assert (await stream.result()).finish_reason == "length"
        stream.abort()
        engine.abort(["a", "b"])
        assert engine.stats().num_aborted == 0


# --- what a reader is handed --------------------------------------------------------------


async def test_a_delta_that_arrives_with_a_cancellation_is_not_lost():
    rig = fake(gate=0)
    async with engine_of(rig) as engine:
        stream = engine.stream([1], max_tokens=20)
        read = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        mailbox = mailbox_of_this_loop(engine)
        rig.executor.gate.release()
        # This loop is blocked: the wake comes when the test says so.
        blocking_until(lambda: mailbox._channels_to_wake)
        mailbox._wake_readers()
        assert channel_of(stream).waiter.done()
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        rig.executor.gate.release(100)
        with pytest.raises(RequestError, match="a read of its stream was cancelled"):
            await stream.result()
        tokens = stream._make_outputs()[0].token_ids
        assert tokens
        assert list(tokens) == rig.executor.reference([1], len(tokens))


async def test_read_in_a_task_of_its_own_outlives_every_timeout():
    rig = fake(gate=0)
    async with engine_of(rig) as engine:
        stream = engine.stream([1], max_tokens=5)
        for token in rig.executor.reference([1], 5):
            read = asyncio.ensure_future(anext(stream))
            assert not (await asyncio.wait({read}, timeout=0.01))[0]
            rig.executor.gate.release()
            while not (await asyncio.wait({read}, timeout=0.01))[0]:
                pass
            assert (await read).token_ids == (token,)
        assert stream.finish_reason == "length"


@pytest.mark.parametrize("logprobs", [None, TokenLogprobs(Logprob(7, -0.5, 1), ())])
async def test_a_delta_of_one_token_is_a_delta_like_any_other(logprobs):
    delta = make_token_delta(7, "seven", logprobs)
    same = Delta("seven", (7,), logprobs=None if logprobs is None else (logprobs,))
    assert type(delta) is Delta
    assert (delta, hash(delta), repr(delta)) == (same, hash(same), repr(same))
    assert pickle.loads(pickle.dumps(delta)) == delta
    with pytest.raises(dataclasses.FrozenInstanceError):
        delta.text = "eight"


@pytest.mark.parametrize("how", ["iterate", "result", "completion"])
async def test_a_request_that_failed_leaves_no_cycle(how):
    """Its stream and exception are gone with their last references, and not when gc runs."""
    rig, left = fake(), []

    async def read(engine):
        stream = engine.stream([1], max_tokens=500, timeout=0.02)
        left.append(weakref.ref(stream))
        try:
            if how == "iterate":
                async for _ in stream:
                    pass
            await stream.result()
        except DeadlineExceededError as error:
            left.append(weakref.ref(error))
        if how == "completion":
            with pytest.raises(DeadlineExceededError) as again:
                stream.completion()
            left.append(weakref.ref(again.value))
            del again

    async with rig.engine() as engine:
        gc.collect()
        gc.disable()
        try:
            await engine.pause()
            await read(engine)
            await engine.resume()
            await engine.generate([1], max_tokens=2)  # the engine thread is past it
            assert [one() for one in left] == [None] * len(left)
        finally:
            gc.enable()
