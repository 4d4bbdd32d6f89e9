"""EngineGroup: several engines behind one object, on the fake executor."""

from __future__ import annotations

import asyncio
import copy
import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncllm import (
    LLM,
    AsyncLLMEngine,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineGroup,
    EngineOverloadedError,
    InvalidRequestError,
    ModelLoadError,
    group_queue,
)
from asyncllm.callbacks import stream_with_callbacks
from asyncllm.core.admission import Admission
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.token_rate import TokenRate
from asyncllm.group_queue import GroupQueue, _RoutingObserver
from asyncllm.metrics import EngineMetrics
from asyncllm.routing import Candidate, text_hashes
from asyncllm.runtime.submitter import Submission
from asyncllm.serving import create_app
from asyncllm.stream import TokenStream
from asyncllm.testing import byte_tokenizer, fake_engine
from asyncllm.text.long_text import LONG_TEXT_CHARACTERS
from asyncllm.text.tokenizer import Tokenizer
from tests.event_loops import run as run  # a fixture
from tests.fakes import core_of, engine_number, fake, fake_group, sampling_of
from tests.idle import all_free, idle, until


@pytest.fixture(autouse=True)
def equal_rates(monkeypatch):
    """Steps of a fake take microseconds, whose rates would be noise."""
    monkeypatch.setattr(TokenRate, "tokens_per_second", 1000.0)


def finished(group):
    """Requests that each engine has ended, by number."""
    return {number: stats.num_finished for number, stats in group.stats().engines.items()}


def submitted(group):
    return {number: stats.num_requests for number, stats in group.stats().engines.items()}


async def die(rig, group, number=0):
    """The engine of a rig fails in its next step."""
    engine = group.engines[number]
    rig.executor.faults[engine.stats().num_steps] = ZeroDivisionError("on purpose")
    with pytest.raises(EngineDeadError):
        await engine.generate([1], max_tokens=9)
    await until(lambda: engine.state == "dead")


class Watcher:
    """An observer that notes what it is told, and by which engine."""

    def __init__(self):
        self.submitted, self.finished, self.dead = [], [], []

    def on_submit(self, request, submission):
        self.submitted.append((request.group.engine, request.request_id))

    def on_finish(self, request, usage, error):
        self.finished.append((request.group.engine, type(error).__name__))

    def on_engine_dead(self, engine, error):
        self.dead.append((engine, str(error)))


# --- a group as an engine ---------------------------------------------------------------


def test_requests_spread_and_have_the_tokens_of_any_engine(run):
    rig = fake_group(4)

    async def main():
        async with rig.engine() as group:
            assert (group.state, group.max_model_len) == ("running", 256)
            assert group._num_slots == sum(one._num_slots for one in group.engines.values()) > 4
            streams = [group.stream([i, 5], max_tokens=6) for i in range(32)]
            assert all(type(stream) is TokenStream for stream in streams)
            for i, stream in enumerate(streams):
                tokens = list((await stream.result()).token_ids)
                assert tokens == rig.executor.reference([i, 5], 6)
            counts = finished(group)
            assert sum(counts.values()) == group.stats().num_finished == 32
            assert set(counts) == {0, 1, 2, 3}
            assert list(group.engines) == [0, 1, 2, 3]
        assert group.state == "closed"
        assert group.error is None
        assert {engine.state for engine in group.engines.values()} == {"closed"}
        with pytest.raises(EngineClosedError):
            group.stream([1])
        await group.aclose()
        await group.wait_closed()

    run(main)


async def test_group_seeds_equal_engine_seeds():
    async def seeds(engine):
        async with engine:
            streams = [engine.stream([i], max_tokens=1) for i in range(12)]
            return [sampling_of(stream).seed for stream in streams]

    alone = await seeds(fake().engine(seed=7))
    assert await seeds(fake_group(3).engine(seed=7)) == alone
    assert await seeds(fake_group(3).engine(seed=8)) != alone


async def test_stats_are_sums_and_each_engines_own():
    rig = fake_group(2)
    async with rig.engine() as group:
        await asyncio.gather(*[group.generate([i], max_tokens=3) for i in range(10)])
        stats = group.stats()
        one, other = stats.engines.values()
        for name in ("num_requests", "generation_tokens", "num_steps", "num_blocks"):
            assert getattr(stats, name) == getattr(one, name) + getattr(other, name) > 0
        assert stats.last_step_time == max(one.last_step_time, other.last_step_time)
        assert (stats.kv_cache_usage, stats.is_paused) == (0.0, False)
        assert stats.states == {0: "running", 1: "running"}


async def test_the_next_turn_goes_where_its_prefix_is():
    rig = fake_group(3, num_blocks=257)
    async with rig.engine() as group:
        for turn in range(6):
            for user in range(5):
                history = [user] * (12 * (turn + 1))
                result = await group.generate(history, max_tokens=2, cache_salt="a")
                assert result.usage.cached_tokens == (12 * turn if turn else 0)
        prompt = [4] * 72
        held = [engine.cached_prefix(prompt, "a") for engine in group.engines.values()]
        assert sorted(held) == [0, 0, 68]
        assert group.cached_prefix(prompt, "a") == 68
        assert group.cached_prefix(prompt) == group.cached_prefix(prompt, "b") == 0
        assert min(finished(group).values()) > 0


async def test_a_prompt_goes_where_free_blocks_take_it():
    rig = fake_group(2, num_blocks=65, max_model_len=256, max_num_batched_tokens=256)
    async with rig.engine() as group:
        first = group.engines[0]
        held = first.stream([1] * 200, max_tokens=50, on_slow="pause", max_unread=4)
        await until(lambda: held._channel.num_unread == 4)
        assert first.stats().num_free_blocks < 15
        # Of both prompts the first engine has 40 tokens; the rest of one does not fit there.
        large = group.stream([1] * 40 + [5] * 160, max_tokens=1)
        small = group.stream([1] * 40 + [5] * 4, max_tokens=1)
        assert [engine_number(large), engine_number(small)] == [1, 0]
        held.abort()
        assert {await one for one in map(finish, (small, large))} == {"length"}


async def test_a_long_text_goes_where_its_beginning_was():
    rig = fake_group(3, num_blocks=4097, max_model_len=4096, max_num_batched_tokens=4096)
    texts = {i: f"{i} " * (LONG_TEXT_CHARACTERS // 2 + 500) for i in range(6)}
    async with rig.engine() as group:
        watcher = Watcher()
        group.add_observer(watcher)
        for _ in range(3):
            for text in texts.values():
                await group.generate(text, max_tokens=1)
        for i in range(6):
            assert len({engine for engine, _ in watcher.submitted[i::6]}) == 1
        assert len({engine for engine, _ in watcher.submitted}) > 1
        before = len(watcher.submitted)
        results = [
            await group.generate(texts[0], max_tokens=1, cache_salt=str(i)) for i in range(6)
        ]
        assert [result.usage.cached_tokens for result in results] == [0] * 6
        assert len({engine for engine, _ in watcher.submitted[before:]}) > 1


@pytest.fixture
def hashed(monkeypatch):
    """The texts that groups hash to place a prompt, and their hashes."""
    calls = []

    def record(text, salt):
        calls.append((text, text_hashes(text, salt)))
        return calls[-1][1]

    monkeypatch.setattr(group_queue, "text_hashes", record)
    return calls


async def test_a_text_in_parts_is_placed_like_a_string(hashed):
    options = {"max_model_len": 4096, "num_blocks": 4097, "max_num_batched_tokens": 4096}
    texts = ["7 " * 2000, "8 " * 2000]
    contents = ["\n".join(texts), texts, [{"type": "text", "text": text} for text in texts]]
    async with fake_group(2, **options).engine() as group:
        for content in contents:
            stream = group.chat([{"role": "user", "content": content}], max_tokens=1)
            assert (await stream.result()).usage.prompt_tokens == 4000
    assert [text for text, _ in hashed] == ["user\0" + contents[0] + "\0"] * 3
    assert len(hashed[0][1]) == 3
    assert hashed[1][1] == hashed[2][1] == hashed[0][1]


@pytest.mark.parametrize("role", ["user", "r" * 100_000])
async def test_only_the_beginning_of_a_conversation_is_read_to_place_it(hashed, role):
    wide = "\U000e0001" * 100_000
    async with fake_group(2).engine() as group:
        for content in (wide, [wide], [{"type": "text", "text": wide}]):
            messages = [{"role": role, "content": content, "extra": wide}] * 3
            with pytest.raises(InvalidRequestError):
                await group.chat(messages, max_tokens=1)
    (text, hashes), *others = hashed
    assert others == [(text, hashes)] * 2
    assert (text[:65_536], len(hashes)) == (f"{role}\0{wide}"[:65_536], 32)
    assert len(text) <= 2 * 65_536 + 2


async def test_a_waiting_text_is_hashed_once(hashed):
    async with full_group(waiting=0) as (_, group, held, _, line):
        task = asyncio.create_task(group.submit("7 " * 5000, truncate_prompt_tokens=9))
        await until(lambda: len(line) == 1)
        for _ in range(5):
            line.advance()
        assert [text for text, _ in hashed] == ["7 " * 5000]
        held[0].abort()
        (await task).abort()
        assert len(hashed) == 1


# --- ids, places, full queues -----------------------------------------------------------


async def test_token_ids_with_many_bad_words_have_no_text_to_hash():
    rig = fake_group(2)
    async with rig.engine() as group:
        words = [str(i) for i in range(20)]
        assert (
            await group.generate([1, 2], max_tokens=1, bad_words=words)
        ).usage.prompt_tokens == 2


async def test_an_id_is_unique_in_the_group():
    rig = fake_group(4, step_time=0.001)
    async with rig.engine() as group:
        for _ in range(10):
            accepted, refused, barrier = [], [], threading.Barrier(8)

            def submit(accepted=accepted, refused=refused, barrier=barrier):
                barrier.wait()
                try:
                    accepted.append(group.stream([1], max_tokens=200, request_id="x"))
                except InvalidRequestError as error:
                    refused.append(error.param)

            with ThreadPoolExecutor(8) as threads:
                for _ in range(8):
                    threads.submit(submit)
            assert len(accepted) == 1
            assert refused == ["request_id"] * 7
            group.abort("x")
            # The id is free when this returns, and is taken anew.
            again = group.stream([2], max_tokens=2, request_id="x")
            assert (await accepted[0].result()).finish_reason == "abort"
            assert (await again.result()).finish_reason == "length"
            with pytest.raises(InvalidRequestError):
                group.abort([3])


async def test_a_group_is_full_when_all_its_engines_are():
    rig = fake_group(3, max_num_seqs=1)
    async with rig.engine(max_queued_requests=2) as group:
        await group.pause()
        assert group.stats().is_paused
        streams = [group.stream([i], max_tokens=2) for i in range(6)]
        waits = [
            core_of(one).admission.retry_after(streams[0]._group, 1)
            for one in group.engines.values()
        ]
        with pytest.raises(EngineOverloadedError) as caught:
            group.stream([9])
        assert caught.value.retry_after == min(waits)
        assert [len(core_of(one).admission.queued_requests) for one in group.engines.values()] == [
            2,
            2,
            2,
        ]
        assert group.stats().num_requests == 6
        await group.resume()
        await asyncio.gather(*[stream.result() for stream in streams])
        await idle(group)
        await group.generate([9], max_tokens=1)


@asynccontextmanager
async def full_group(size=2, waiting=6):
    """A group of paused engines whose queues are full, and tasks that wait for a place."""
    rig = fake_group(size, max_num_seqs=1)
    async with rig.engine(max_queued_requests=2) as group:
        for engine in group.engines.values():
            await engine.pause()
        held = [group.stream([i], max_tokens=1) for i in range(2 * size)]
        tasks = [asyncio.create_task(group.submit([50 + i], max_tokens=2)) for i in range(waiting)]
        line = group._queue.caller_queue
        await until(lambda: len(line) == waiting)
        yield rig, group, held, tasks, line


async def test_waiters_get_one_place_each():
    async with full_group() as (rig, group, held, tasks, _):
        with pytest.raises(EngineOverloadedError):
            group.stream([1])
        await group.resume()
        for i, task in enumerate(tasks):
            result = await (await task).result()
            assert list(result.token_ids) == rig.executor.reference([50 + i], 2)
        for stream in held:
            await stream.result()
        await idle(group)
        assert group.stats().num_requests == 10
        assert all(
            len(core_of(one).admission.queued_requests) == 0 for one in group.engines.values()
        )


@pytest.mark.parametrize("end", ["removed", "dead"])
@pytest.mark.parametrize("end", ["removed", "dead"])
def submission(task):
    """Outcome of a task that submits: the tokens, or the name of the error."""
    return outcome(task)


@pytest.mark.parametrize("end", ["removed", "dead"])
async def test_waiters_get_places_at_remaining_engines(end):
    async with full_group() as (rig, group, _, tasks, line):
        # A step that fails has freed a place before, and one that waits has got it.
        num_lost = 0 if end == "removed" else 1
        if end == "removed":
            await group.remove(group.engines[0])
        else:
            engine = group.engines[0]
            rig.rigs[0].executor.faults[0] = ZeroDivisionError("on purpose")
            await engine.resume()
            await until(lambda: engine.state == "dead")
        await until(lambda: len(line) == 6 - num_lost)
        tasks[-1].cancel()
        await until(lambda: len(line) == 5 - num_lost)
        await group.resume()
        results = await asyncio.gather(*map(outcome, tasks[:-1]))
        assert results.count("EngineDeadError") == num_lost
        right = [rig.executor.reference([50 + i], 2) for i in range(5)]
        assert all(one in (right[i], "EngineDeadError") for i, one in enumerate(results))
        await idle(group.engines[1])


async def outcome(task):
    """Tokens of a submission, or the name of its error."""
    try:
        return list((await (await task).result()).token_ids)
    except EngineError as error:
        return type(error).__name__


@pytest.mark.parametrize("number", [0, 1])
async def test_waiters_go_to_a_freed_place(number):
    async with full_group() as (rig, group, held, tasks, line):
        await group.engines[number].resume()
        for i, task in enumerate(tasks):
            result = await asyncio.wait_for((await task).result(), 10)
            assert list(result.token_ids) == rig.executor.reference([50 + i], 2)
        assert len(line) == 0
        assert submitted(group) == {number: 8, 1 - number: 2}
        await group.resume()
        assert {await one for one in map(finish, held)} == {"length"}


async def test_waiters_go_to_an_added_engine():
    async with full_group() as (rig, group, held, tasks, line):
        await group.add(fake(max_num_seqs=1).engine(max_queued_requests=2))
        results = await asyncio.wait_for(asyncio.gather(*map(outcome, tasks)), 10)
        assert results == [rig.executor.reference([50 + i], 2) for i in range(6)]
        assert (len(line), submitted(group)) == (0, {0: 2, 1: 2, 2: 6})
        await group.resume()
        assert {await one for one in map(finish, held)} == {"length"}


async def test_owners_take_turns_in_the_line_of_a_group():
    async with full_group(waiting=0) as (_, group, held, _, line):
        for owner in "pqpq":  # So that no other owner has a share of the queues left.
            held.append(group.stream([9], max_tokens=1, owner=owner))
        done = []

        async def submit(owner):
            stream = await group.submit([1], max_tokens=2, owner=owner)
            done.append(owner)
            await stream.result()

        tasks = []
        for count, owner in enumerate(["a", "a", "a", "b", "c"], 1):
            tasks.append(asyncio.create_task(submit(owner)))
            await until(lambda count=count: len(line) == count)
        await group.engines[0].resume()
        await asyncio.gather(*tasks)
        assert done == ["a", "b", "c", "a", "a"]
        await group.resume()
        await asyncio.gather(*map(finish, held))


@pytest.mark.parametrize("end", ["closed", "dead"])
async def test_waiters_fail_when_no_engine_is_left(end):
    async with full_group(waiting=3) as (rig, group, _, tasks, line):
        if end == "closed":
            await group.aclose()
        else:
            for one in rig.rigs:
                one.executor.faults[0] = ZeroDivisionError("on purpose")
            await group.resume()
        expected = {"closed": "EngineClosedError", "dead": "EngineDeadError"}[end]
        results = await asyncio.wait_for(asyncio.gather(*map(outcome, tasks)), 10)
        assert set(results) == {expected}
        assert len(line) == 0


async def test_call_cancelled_at_admission_returns_its_place():
    async with full_group(waiting=1) as (_, group, held, tasks, line):
        held[0].abort()
        while len(line):  # Without a turn of the loop, which would give the call its stream.
            time.sleep(0.001)
        assert group.stats().num_requests == 5
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError) as kept:  # Its traceback has the stream.
            await tasks[0]
        await until(lambda: group.stats().num_waiting == 3)
        await group.resume()
        await asyncio.gather(*map(finish, held))
        await all_free_of_each(group)
        for one in group._queue._router._loads.values():
            assert one.num_requests == one.num_tokens == one.num_uncached == 0
        assert kept.value.__traceback__ is not None


async def test_waiting_call_is_not_counted_as_refusal():
    async with full_group(waiting=1) as (_, group, held, tasks, line):
        engine = group.engines[1]
        alone = asyncio.create_task(engine.submit([7], max_tokens=1))
        own = core_of(engine).admission.caller_queue
        await until(lambda: len(own) == 1)
        assert (len(line), group.stats().num_rejected) == (1, 0)
        held[0].abort()
        held[1].abort()
        by_engine = [stream._group.engine for stream in held]
        assert by_engine[:2] == [0, 1]
        stream, other = await asyncio.gather(alone, tasks[0])
        assert (engine_number(stream), engine_number(other)) == (1, 0)
        await group.resume()
        assert {await one for one in map(finish, [stream, other])} == {"length"}


async def test_id_taken_while_waiting_is_refused():
    async with full_group(waiting=0) as (_, group, held, _, line):
        task = asyncio.create_task(group.submit([1], max_tokens=50, request_id="x"))
        await until(lambda: len(line) == 1)
        # Another owner has a share of the queue, and need not wait.
        stream = group.stream([2], max_tokens=9, request_id="x", owner="other")
        held[0].abort()
        with pytest.raises(InvalidRequestError, match="live request"):
            await task
        await group.resume()
        assert (await stream.result()).finish_reason == "length"
        assert {await one for one in map(finish, held)} == {"abort", "length"}


async def finish(stream):
    return (await stream.result()).finish_reason


# --- death ------------------------------------------------------------------------------


async def test_dead_engine_is_reported_and_skipped():
    rig, watcher = fake_group(3), Watcher()
    async with rig.engine() as group:
        group.add_observer(watcher)
        await group.pause()
        held = [group.stream([i], max_tokens=4) for i in range(9)]
        rig.rigs[1].executor.faults[0] = ZeroDivisionError("on purpose")
        await group.resume()
        results = await asyncio.gather(*[s.result() for s in held], return_exceptions=True)
        assert sum(isinstance(one, EngineDeadError) for one in results) == 3
        await until(lambda: watcher.dead)
        assert watcher.dead == [(1, "the engine died: ZeroDivisionError: on purpose")]
        assert (group.state, group.error) == ("running", None)
        assert group.stats().states == {0: "running", 1: "dead", 2: "running"}
        before = submitted(group)
        for i in range(20):
            await group.generate([i], max_tokens=2)
        assert submitted(group)[1] == before[1]
        assert sum(submitted(group).values()) == sum(before.values()) + 20
        assert await group.reset_prefix_cache()
        await group.remove(group.engines[1])
        assert list(group.engines) == [0, 2]


async def test_a_group_without_a_running_engine_is_dead():
    rig = fake_group(2)
    async with rig.engine() as group:
        waiting = asyncio.create_task(group.wait_closed())
        for number in (0, 1):
            assert not waiting.done()
            await die(rig.rigs[number], group, number)
        with pytest.raises(EngineDeadError, match="on purpose"):
            await waiting
        assert group.state == "dead"
        for call in (lambda: group.stream([1]), lambda: raise_of(group.error)):
            with pytest.raises(EngineDeadError, match="on purpose"):
                call()
        with pytest.raises(EngineDeadError):
            await group.submit([1])
        with pytest.raises(InvalidRequestError, match="another runs"):
            await group.remove(group.engines[0])
    assert group.state == "closed"


def raise_of(error):
    raise error


@pytest.mark.parametrize("how", ["stream", "chat", "blocking", "map", "several"])
async def test_tokenless_requests_are_resent(how):
    rig = fake_group(2)
    async with rig.engine(retries=1, seed=3) as group:
        await group.engines[1].pause()
        core = core_of(group.engines[0])
        await group.engines[0].pause()
        options = {"max_tokens": 5, "temperature": 1.0, "request_id": "x"}
        if how == "map":
            del options["request_id"]
            results = aiter(group.map([[4, 2]], **options))
            reading = asyncio.create_task(anext(results))
        elif how == "chat":
            stream = group.chat([{"role": "user", "content": "4 2"}], **options)
            reading = asyncio.create_task(stream.result())
        else:
            outputs = {"n": 3} if how == "several" else {}
            stream = group.stream([4, 2], **options, **outputs)
            if how == "blocking":
                mailbox = group._thread_mailbox()

                def read():
                    while stream.read_blocking(mailbox) is not None:
                        pass
                    return stream.completion()

                reading = asyncio.create_task(asyncio.to_thread(read))
            else:
                reading = asyncio.create_task(stream.result())
        await until(
            lambda: (
                core.admission.num_live_requests
                or core_of(group.engines[1]).admission.num_live_requests
            )
        )
        seed = sampling_of(stream).seed if how != "map" else 11
        number = 0 if core.admission.num_live_requests else 1
        rig.rigs[number].executor.faults[0] = ZeroDivisionError("on purpose")
        await group.engines[1 - number].resume()
        await group.engines[number].resume()
        result = await asyncio.wait_for(reading, 10)
        if how == "map":
            result = result.completion
        assert group.stats().states[number] == "dead"
        assert group.stats().engines[1 - number].num_finished == 1
        if how != "map":
            assert result.request_id == "x"
            assert sampling_of(stream).seed == seed
        async with fake().engine() as alone:
            options.pop("request_id", None)
            expected = await alone.generate(
                [4, 2], **options, **({"n": 3} if how == "several" else {})
            )
        assert [one.token_ids for one in result.outputs] == [
            one.token_ids for one in expected.outputs
        ]


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_request_keeps_no_text_once_it_is_tokenised(is_chat):
    rig, prompts = fake_group(2), []
    watcher = Watcher()
    watcher.on_submit = lambda request, submission: prompts.append(submission.prompt)
    async with rig.engine(retries=1) as group:
        group.add_observer(watcher)
        for engine in group.engines.values():
            await engine.pause()
        text = "4 2 " * 3000
        num_references = sys.getrefcount(text)
        messages = [{"role": "user", "content": text, "extra": text}]
        call, prompt = (group.chat, messages) if is_chat else (group.stream, text)
        stream = call(prompt, max_tokens=5, truncate_prompt_tokens=2)
        assert prompts.pop() is prompt
        del messages, prompt
        await until(lambda: stream.prompt_token_ids)
        await until(lambda: sys.getrefcount(text) == num_references, 5)
        number = engine_number(stream)
        rig.rigs[number].executor.faults[0] = ZeroDivisionError("on purpose")
        for engine in group.engines.values():
            await engine.resume()
        tokens = []
        async for delta in stream:
            tokens += delta.token_ids
            assert stream._resubmit is None
        assert tokens == rig.executor.reference([4, 2], 5)
        assert engine_number(stream) == 1 - number
        assert prompts == [(4, 2)]


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_text_is_tokenised_where_it_is_sent_again(is_chat):
    rig, gate, prompts = fake_group(2), threading.Event(), []
    watcher = Watcher()
    watcher.on_submit = lambda request, submission: prompts.append(submission.prompt)
    async with rig.engine(retries=1) as group:
        group.add_observer(watcher)
        for one in rig.rigs:
            one.tokenizer.gate = gate
        text = "4 2 " * 3000
        prompt = [{"role": "user", "content": text}] if is_chat else text
        call = group.chat if is_chat else group.stream
        stream = call(prompt, max_tokens=5, truncate_prompt_tokens=2)
        number = engine_number(stream)
        await die(rig, group, number)
        reading = asyncio.create_task(stream.result())
        await until(lambda: engine_number(stream) == 1 - number)
        gate.set()
        assert list((await reading).token_ids) == rig.executor.reference([4, 2], 5)
        assert prompts[::2] == [prompt, prompt]


async def test_request_with_a_token_is_not_resent():
    rig = fake_group(2, step_time=0.001)
    async with rig.engine(retries=1) as group:
        stream = group.stream([4, 2], max_tokens=200)
        await until(lambda: stream._channel.num_written > 2)
        number = engine_number(stream)
        steps = group.engines[number].stats().num_steps
        rig.rigs[number].executor.faults[steps + 5] = ZeroDivisionError("on purpose")
        tokens = []
        with pytest.raises(EngineDeadError):
            async for delta in stream:
                tokens += delta.token_ids
        assert tokens == rig.executor.reference([4, 2], len(tokens))
        assert submitted(group)[1 - number] == 0


async def test_aborted_retried_or_unroutable_requests_are_not_resent():
    rig = fake_group(3)
    async with rig.engine(retries=1, max_queued_requests=1) as group:
        for engine in group.engines.values():
            await engine.pause()
        streams = [group.stream([i], max_tokens=3) for i in range(3)]
        by_engine = {engine_number(stream): stream for stream in streams}
        rig.rigs[0].executor.faults[0] = ZeroDivisionError("on purpose")
        await group.engines[0].resume()
        await until(lambda: group.engines[0].state == "dead")
        # The others are full: the first error stays.
        with pytest.raises(EngineDeadError):
            await by_engine[0].result()
        rig.rigs[1].executor.faults[0] = ZeroDivisionError("on purpose")
        by_engine[1].abort()
        await group.engines[1].resume()
        assert (await by_engine[1].result()).finish_reason == "abort"
        await until(lambda: group.engines[1].stats().num_waiting == 0)
        before = submitted(group)
        again = group.stream([7], max_tokens=3)
        if engine_number(again) == 1:
            await until(lambda: group.engines[1].state == "dead")
            again.abort()
            with pytest.raises(EngineDeadError):
                await again.result()
            assert submitted(group)[2] == before[2]


async def test_a_request_is_sent_again_only_so_often():
    rig = fake_group(3)
    for one in rig.rigs:
        one.executor.faults[0] = ZeroDivisionError("on purpose")
    watcher = Watcher()
    async with rig.engine(retries=1) as group:
        group.add_observer(watcher)
        with pytest.raises(EngineDeadError):
            await group.generate([1], max_tokens=3, request_id="x")
        assert [name for _, name in watcher.submitted] == ["x", "x"]
        assert len({engine for engine, _ in watcher.submitted}) == 2
        assert [error for _, error in watcher.finished] == ["EngineDeadError"] * 2
        states = list(group.stats().states.values())
        assert sorted(states) == ["dead", "dead", "running"]


async def test_dropped_resendable_stream_is_aborted_at_once():
    async with fake_group(2, step_time=0.001).engine(retries=1) as group:
        stream = group.stream([1], max_tokens=250)
        await anext(stream)
        request_group = stream._group
        gc.disable()
        try:
            del stream
            assert request_group.cancelled
        finally:
            gc.enable()


# --- engines that come and go -----------------------------------------------------------


async def test_engines_come_and_go_while_streams_run():
    rig, spare = fake_group(2, step_time=0.001), fake(step_time=0.001)
    async with rig.engine() as group:
        watcher = Watcher()
        group.add_observer(watcher)
        streams = [group.stream([i], max_tokens=60) for i in range(8)]
        added = spare.engine()
        await group.add(added)
        assert list(group.engines) == [0, 1, 2]
        assert added.state == "running"
        later = [group.stream([100 + i], max_tokens=20) for i in range(12)]
        assert submitted(group)[2] >= 4
        assert any(engine == 2 for engine, _ in watcher.submitted)
        leaving = group.engines[0]
        removal = asyncio.create_task(group.remove(leaving, drain=None))
        await until(lambda: leaving.state == "closed")
        held = submitted(group)[0]
        drained = next(s for s in streams if engine_number(s) == 0)
        group.abort(drained.request_id)  # Its engine drains, and is still in reach.
        more = [group.stream([200 + i], max_tokens=2) for i in range(6)]
        assert submitted(group)[0] == held
        await removal
        assert list(group.engines) == [1, 2]
        for stream in [*streams, *later, *more]:
            result = await stream.result()
            assert result.finish_reason == ("abort" if stream is drained else "length")
        assert leaving.stats  # It is the application's object still.
        replacement = fake().engine()
        await group.add(replacement)
        assert list(group.engines) == [1, 2, 3]
    assert replacement.state == "closed"


async def test_an_engine_added_while_a_text_is_tokenised():
    rig, gate = fake_group(1, num_blocks=4097, max_model_len=4096), threading.Event()
    async with rig.engine() as group:
        rig.rigs[0].tokenizer.gate = gate
        text = "7 " * (LONG_TEXT_CHARACTERS // 2 + 100)
        stream = group.stream(text, max_tokens=1)
        added = fake(num_blocks=4097, max_model_len=4096)
        await group.add(added.engine())
        assert submitted(group) == {0: 1, 1: 0}
        other = await group.generate([1], max_tokens=2)
        assert list(other.token_ids) == added.executor.reference([1], 2)
        gate.set()
        assert (await stream.result()).usage.prompt_tokens == LONG_TEXT_CHARACTERS // 2 + 100
        assert len(core_of(group.engines[0]).admission.queued_requests) == 0
        assert core_of(group.engines[0]).admission.num_queued_tokens == 0


async def test_the_engine_that_stands_for_all_may_go():
    rig = fake_group(2)
    async with rig.engine() as group:
        tokenizer = group.tokenizer
        assert tokenizer is rig.rigs[0].tokenizer
        await group.remove(group.engines[0])
        assert group.tokenizer is rig.rigs[1].tokenizer
        result = await group.generate("3 5 8", max_tokens=2)
        assert list(result.token_ids) == rig.executor.reference([3, 5, 8], 2)
        assert await group.tokenize("1 2") == [1, 2]
        assert await group.detokenize([1, 2]) == "1 2 "


async def test_separately_paused_engine_gets_no_requests():
    async with fake_group(2).engine() as group:
        await group.engines[0].pause()
        for i in range(6):
            await group.generate([i], max_tokens=1)
        assert finished(group) == {0: 0, 1: 6}
        await group.pause()
        await group.add(fake().engine())
        stream = group.stream([1], max_tokens=1)
        await asyncio.sleep(0.02)
        assert stream.finish_reason is None
        assert group.stats().num_waiting == 1
        await group.resume()
        assert (await stream.result()).finish_reason == "length"
        assert not any(stats.is_paused for stats in group.stats().engines.values())


async def test_separately_closed_engine_gets_no_requests():
    async with fake_group(2).engine() as group:
        await group.engines[1].aclose()
        for i in range(4):
            await group.generate([i], max_tokens=1)
        assert group.stats().states == {0: "running", 1: "closed"}
        with pytest.raises(InvalidRequestError, match="another runs"):
            await group.remove(group.engines[0])
        await group.remove(group.engines[1])
        await group.engines[0].aclose()
        assert group.state == "closed"
        with pytest.raises(EngineClosedError):
            group.stream([1])


def test_a_start_is_all_or_nothing(run):
    async def main():
        rig = fake_group(3)
        group = rig.engine()
        assert group.state == "new"
        with pytest.raises(EngineClosedError, match="new"):
            group.stream([1])
        rig.rigs[1].load_error = ModelLoadError("no file")
        with pytest.raises(ModelLoadError, match="no file"):
            await group.start()
        assert group.state == "new"
        assert {engine.state for engine in group.engines.values()} == {"new"}
        rig.rigs[1].load_error = None
        rig.rigs[2].load_gate = threading.Event()
        with anyio.move_on_after(0.05):
            await group.start()
        rig.rigs[2].load_gate.set()
        rig.rigs[2].load_gate = None
        assert group.state == "new"
        for one in rig.rigs:
            one.executor.closed = False
        async with group:
            assert group.load_progress == (300, 300)
            assert group.load_stage == "weights"
            await group.generate([1], max_tokens=1)
            with pytest.raises(EngineError, match="running"):
                await group.start()

    run(main)


async def test_a_group_of_running_engines_needs_no_start():
    engines = [fake().engine() for _ in range(2)]
    for engine in engines:
        await engine.start()
    group = EngineGroup(engines)
    await group.generate([1], max_tokens=1)
    with LLM(engine=group) as llm:
        found = await asyncio.to_thread(llm.generate, [[1], [2], [3]], max_tokens=2)
        assert [len(one.token_ids) for one in found] == [2, 2, 2]
        mapped = await asyncio.to_thread(lambda: list(llm.map([[1], [2]], max_tokens=2)))
        assert [one.completion.token_ids for one in mapped] == [one.token_ids for one in found[:2]]
    assert group.state == "running"
    await group.aclose()
    assert {engine.state for engine in engines} == {"closed"}


# --- bad input --------------------------------------------------------------------------


async def test_invalid_groups_are_refused():
    running, closed = fake().engine(), fake().engine()
    await running.start()
    await closed.aclose()
    in_group = fake().engine()
    group = EngineGroup([in_group])
    one = fake().engine()
    bad = [
        ([], "engines"),
        (None, "engines"),
        ("engines", "engines"),
        ([one, one], "engines"),
        ([running, fake().engine()], "engines"),
        ([3], "engine"),
        ([closed], "engine"),
        ([group], "engine"),
        ([in_group], "engine"),
    ]
    for engines, param in bad:
        with pytest.raises(InvalidRequestError) as caught:
            EngineGroup(engines)
        assert caught.value.param == param, engines
    for retries in (-1, 1.5, None, True):
        with pytest.raises(InvalidRequestError) as caught:
            EngineGroup([one], retries=retries)
        assert caught.value.param == "retries"
    EngineGroup([one])  # It was left as it was.
    await running.aclose()


DIFFERENT = {
    "max_model_len": lambda: fake_engine("a", max_model_len=512),
    "chat_template": lambda: fake_engine("a", chat_template="{{ messages[0].content }}"),
    "scheduling_policy": lambda: fake_engine("a", scheduling_policy="priority"),
    "vocab_size": lambda: fake(num_blocks=1025, max_model_len=4096).engine(),
}


@pytest.mark.parametrize("name", DIFFERENT)
async def test_engines_that_differ_are_refused(name):
    group = EngineGroup([fake_engine("yes"), DIFFERENT[name]()])
    with pytest.raises(InvalidRequestError, match=f"engine: its {name} is") as caught:
        await group.start()
    assert caught.value.param == "engine"
    assert group.state == "new"
    async with EngineGroup([fake_engine("yes")]) as group:
        other = DIFFERENT[name]()
        with pytest.raises(InvalidRequestError, match="engine: its"):
            await group.add(other)
        assert other.state == "new"
        await other.start()
        with pytest.raises(InvalidRequestError, match="engine: its"):
            await group.add(other)
        assert other.state == "running"
        await other.aclose()
        assert list(group.engines) == [0]


async def test_tokenizers_of_equal_size_have_to_be_equal():
    rig = fake_group(2)
    rig.rigs[1].tokenizer.fingerprint = b"other numbers"
    with pytest.raises(InvalidRequestError, match="its tokenizer is b'other numbers', expected"):
        await rig.engine().start()
    tokenizer = byte_tokenizer()
    assert tokenizer.fingerprint == byte_tokenizer().fingerprint
    tokenizer.backend.add_tokens(["another"])
    assert Tokenizer(tokenizer.backend, tokenizer.chat_template, {}).fingerprint != (
        byte_tokenizer().fingerprint
    )


async def test_failed_or_dropped_group_frees_its_engines():
    rig = fake_group(2)
    group = rig.engine()
    engines = list(group.engines.values())
    rig.rigs[1].load_error = ModelLoadError("no file")
    with pytest.raises(ModelLoadError):
        await group.start()
    rig.rigs[1].load_error = None
    assert [engine._observers.engine for engine in engines] == [None, None]
    async with EngineGroup(engines[:1]) as other:
        assert group.state == "new"
        with pytest.raises(InvalidRequestError, match="in no other group") as caught:
            await group.start()
        assert caught.value.param == "engine"
        assert [engine._group is None for engine in engines] == [False, True]
        await group.aclose()
        assert [engine.state for engine in engines] == ["running", "closed"]
        assert (other.state, group.state) == ("running", "closed")
        await other.generate([1], max_tokens=1)

    rig = fake_group(2)
    group = rig.engine()
    engines = list(group.engines.values())
    await group.start()
    stream = group.stream([1], max_tokens=3)
    gc.disable()
    try:
        del group
        assert [engine._group for engine in engines] == [None, None]
    finally:
        gc.enable()
    assert [engine._observers.engine for engine in engines] == [None, None]
    assert [len(core_of(engine).admission.caller_queues) for engine in engines] == [1, 1]
    assert (await stream.result()).finish_reason == "length"
    group = EngineGroup(engines)
    await group.generate([1], max_tokens=1)
    await group.aclose()


async def test_a_group_of_one_adds_nothing_to_a_request():
    async with fake_group(1).engine() as group:
        stream = group.stream([1, 2, 3, 4, 5], max_tokens=2)
        assert stream._request.group.notifier is None
        await stream.result()
        assert group._queue._router._loads == {}
        waited = await group.submit([1, 2, 3, 4, 5], max_tokens=2)
        assert waited._request.group.notifier is None
        assert (await waited.result()).usage.cached_tokens == 4
        assert group.stats().num_requests == 2


async def test_invalid_add_and_remove_are_refused():
    other_group = EngineGroup([fake().engine()])
    closed = fake().engine()
    await closed.aclose()
    group = fake_group(2).engine()
    with pytest.raises(EngineClosedError):
        await group.add(fake().engine())
    async with group:
        first = group.engines[0]
        for engine in (first, closed, None, group, other_group.engines[0]):
            with pytest.raises(InvalidRequestError) as caught:
                await group.add(engine)
            assert caught.value.param == "engine"
        for engine in (other_group.engines[0], fake().engine(), None, group):
            with pytest.raises(InvalidRequestError, match="engine of this group"):
                await group.remove(engine)
        broken = fake()
        broken.load_error = ModelLoadError("no file")
        engine = broken.engine()
        with pytest.raises(ModelLoadError):
            await group.add(engine)
        broken.load_error = None
        await group.add(engine)
        await group.remove(first)
        with pytest.raises(InvalidRequestError, match="engine of this group"):
            await group.remove(first)
        await group.remove(engine)
        with pytest.raises(InvalidRequestError, match="another runs"):
            await group.remove(group.engines[1])
    with pytest.raises(EngineClosedError):
        await group.add(fake().engine())


# --- what takes an engine ---------------------------------------------------------------


async def test_groups_are_accepted_as_engines():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from asyncllm.tracing import trace_engine

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    group = EngineGroup([fake_engine(lambda question: question.upper()) for _ in range(2)])
    app = create_app(group)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")
    async with group, client:
        with trace_engine(group, provider):

            async def answer(text):
                body = {"messages": [{"role": "user", "content": text}]}
                found = (await client.post("/v1/chat/completions", json=body)).json()
                return found["choices"][0]["message"]["content"]

            texts = [f"{i} {'hello ' * i}" for i in range(8)]
            answers = await asyncio.gather(*map(answer, texts))
            assert answers == [text.upper() for text in texts]
        engines = [span.attributes["asyncllm.engine"] for span in exporter.get_finished_spans()]
        assert (len(engines), set(engines)) == (8, {0, 1})
        assert (await client.get("/health")).json()["status"] == "running"
        counts = finished(group)
        page = (await client.get("/metrics")).text
        for number, count in counts.items():
            assert num_observed(page, number) == count > 0
        tokens = (await client.post("/tokenize", json={"prompt": "abc"})).json()["tokens"]
        assert len(tokens) == 3
        stream = stream_with_callbacks(group, "hello", handlers=[])
        assert "".join([delta.text async for delta in stream]) == "HELLO"
        await group.add(fake_engine("late"))
        await group.engines[2].generate("by itself")
        page = (await client.get("/metrics")).text
        assert num_observed(page, 2) == finished(group)[2] == 1
    with pytest.raises(InvalidRequestError, match="EngineGroup alone"):
        EngineMetrics([EngineGroup([fake().engine()]), fake().engine()])


def num_observed(page, number):
    """Requests of an engine in the metrics."""
    return next(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "asyncllm:request_generation_tokens_count"
        and sample.labels["engine"] == str(number)
    )


async def test_an_application_starts_its_group():
    group = EngineGroup([fake_engine("yes") for _ in range(2)])
    app, sent, received = create_app(group), asyncio.Queue(), asyncio.Queue()
    task = asyncio.create_task(app({"type": "lifespan"}, received.get, sent.put))
    await received.put({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    assert group.state == "running"
    await received.put({"type": "lifespan.shutdown"})
    assert (await sent.get())["type"] == "lifespan.shutdown.complete"
    await task
    assert group.state == "closed"


# --- the tests notice a broken group ----------------------------------------------------


def a_dead_engine_is_chosen_again(patch):
    state = AsyncLLMEngine.state.fget

    def lie(self):
        found = state(self)
        return "running" if found == "dead" and not isinstance(self, EngineGroup) else found

    patch.setattr(AsyncLLMEngine, "state", property(lie))


def a_retry_answers_twice(patch):
    def careless(self):
        lost = isinstance(self._channel.stream_end, EngineDeadError)
        return lost and self._resubmit is not None and self._resubmit(self)

    patch.setattr(TokenStream, "_try_resubmit", careless)


def a_place_is_reserved_twice(patch):
    reserve = Admission.reserve

    def twice(self, group, num_tokens):
        reserve(self, group, num_tokens)
        self.queued_requests[copy.copy(group.members[0])] = num_tokens

    patch.setattr(Admission, "reserve", twice)


def ids_are_unique_in_one_engine_only(patch):
    patch.setattr(GroupQueue, "engine_cores", lambda self: [])


def a_retry_draws_another_seed(patch):
    again = Submission.copy_for_retry

    def other(self, stream=None):
        found = again(self, stream)
        for member in found.request.group.members:
            object.__setattr__(member.sampling, "seed", member.sampling.seed + 1)
        return found

    patch.setattr(Submission, "copy_for_retry", other)


def the_router_forgets_to_settle(patch):
    patch.setattr(_RoutingObserver, "on_finish", lambda self, request, usage, error: None)
    patch.setattr(_RoutingObserver, "on_first_token", lambda self, request: None)
    patch.setattr(_RoutingObserver, "withdraw_request", lambda self: None)


def free_blocks_are_ignored(patch):
    def candidate(*args, missing_tokens):
        return Candidate(*args)

    patch.setattr(group_queue, "Candidate", candidate)


def affinity_is_ignored(patch):
    patch.setattr(EngineCore, "num_cached_tokens", lambda self, prompt: 0)


def those_who_wait_pass_nobody(patch):
    patch.setattr(GroupQueue, "admit_waiting_requests", lambda self, engine: None)


async def nothing_is_pending():
    rig = fake_group(2, max_num_seqs=1)
    async with rig.engine(max_queued_requests=1) as group:
        streams = [group.stream([i], max_tokens=1) for i in range(2)]
        streams[0].abort()
        for stream in streams:
            await stream.result()
        await group.submit([1], max_tokens=1)
        await all_free_of_each(group)
        ledgers = group._queue._router._loads
        assert sorted(ledgers) == [0, 1]
        for one in ledgers.values():
            assert one.num_requests == one.num_tokens == one.num_uncached == 0


async def all_free_of_each(group):
    for engine in group.engines.values():
        await all_free(engine)


BREAKAGES = {
    a_dead_engine_is_chosen_again: test_dead_engine_is_reported_and_skipped,
    a_retry_answers_twice: test_request_with_a_token_is_not_resent,
    a_place_is_reserved_twice: test_a_group_is_full_when_all_its_engines_are,
    ids_are_unique_in_one_engine_only: test_an_id_is_unique_in_the_group,
    a_retry_draws_another_seed: lambda: test_tokenless_requests_are_resent("stream"),
    the_router_forgets_to_settle: nothing_is_pending,
    free_blocks_are_ignored: test_a_prompt_goes_where_free_blocks_take_it,
    affinity_is_ignored: test_the_next_turn_goes_where_its_prefix_is,
    those_who_wait_pass_nobody: lambda: test_waiters_go_to_a_freed_place(0),
}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda one: one.__name__)
async def test_a_broken_group_is_noticed(breakage, monkeypatch):
    test = BREAKAGES[breakage]
    await asyncio.wait_for(test(), 20)
    breakage(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        await asyncio.wait_for(test(), 2)


async def test_request_too_large_for_every_engine_is_invalid():
    async with fake_group(2).engine(max_queued_requests=4) as group:
        with pytest.raises(InvalidRequestError, match="at most max_queued_requests=4") as caught:
            group.stream([1], n=5, max_tokens=1)
        assert caught.value.param == "n"


async def test_abort_finds_stream_waiting_to_be_resent():
    rig = fake_group(2)
    async with rig.engine(retries=1) as group:
        for engine in group.engines.values():
            await engine.pause()
        stream = group.stream([4, 2], max_tokens=5, request_id="x")
        number = next(
            n for n, one in group.engines.items() if core_of(one).admission.get_live_group("x")
        )
        rig.rigs[number].executor.faults[0] = RuntimeError("device lost")
        await group.engines[number].resume()
        await until(lambda: group.engines[number].state == "dead")
        await group.engines[1 - number].resume()
        group.abort("x")
        with pytest.raises(EngineDeadError):
            await stream.result()


async def test_a_dead_group_says_so_in_every_call():
    rig = fake_group(1)
    async with rig.engine() as group:
        rig.rigs[0].executor.faults[0] = RuntimeError("device lost")
        with pytest.raises(EngineDeadError):
            await group.generate([1], max_tokens=1)
        for call in (group.pause, group.resume, group.reset_prefix_cache):
            with pytest.raises(EngineDeadError):
                await call()
        assert group.cached_prefix([1, 2, 3]) == 0
        assert group._thread_mailbox() is not None


async def test_a_cancelled_removal_removes():
    rig = fake_group(2, step_time=0.01)
    async with rig.engine() as group:
        streams = [group.stream([i], max_tokens=200) for i in range(4)]
        await until(lambda: group.stats().num_running == 4)
        first = group.engines[0]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(group.remove(first, drain=60), 0.05)
        assert list(group.engines) == [1]
        for stream in streams:
            stream.abort()
        await first.wait_closed()
