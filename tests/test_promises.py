"""Each promise of docs/streaming.md, once as it is and once with the engine broken on purpose:
a check that a broken engine passes would promise nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest

from asyncllm import DeadlineExceededError, EngineOverloadedError, RequestError
from asyncllm.core.admission import Admission
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.output_processor import OutputProcessor
from asyncllm.core.request import Request
from asyncllm.core.scheduler import Scheduler
from asyncllm.runtime.engine_thread import EngineThread
from asyncllm.runtime.mailbox import LoopMailbox
from asyncllm.runtime.submitter import Submitter
from asyncllm.stream import TokenStream
from asyncllm.testing import FakeExecutor
from tests.fakes import channel_of, engines_of, fake, fake_group, mailbox_of_this_loop
from tests.idle import until
from tests.packaged_group import packaged_group

PATIENCE = 1.5


def blocks_are_free(engine):
    return engine.stats().num_free_blocks == engine.stats().num_blocks


# --- 1 ----------------------------------------------------------------------------------


async def every_stream_ends(fake):
    async with fake(eos_token_ids=tuple(range(0, 1000, 10))).engine() as engine:
        for i in range(12):
            ends = [d.finish_reason async for d in engine.stream([i], max_tokens=8)]
            assert ends[-1] in ("stop", "length")
            assert ends[:-1] == [None] * (len(ends) - 1)


def a_stop_is_not_announced(patch):
    end_group = OutputProcessor.end_group

    def forget(self, request, error, last_delta=None):
        if request.finish_reason != "stop":
            end_group(self, request, error, last_delta)

    patch.setattr(OutputProcessor, "end_group", forget)


# --- 2 ----------------------------------------------------------------------------------


async def stream_submits_at_once(fake):
    rig = fake(record=True, gate=0)
    async with rig.engine() as engine:
        streams = [engine.stream([i], max_tokens=3) for i in range(6)]
        await asyncio.sleep(0.05)
        for executor in rig.executors:
            executor.gate.release(100)
        for stream in streams:
            await stream.result()
    assert sum(max(len(batch) for batch in one.batches) for one in rig.executors) == 6


def submission_waits_for_the_first_read(patch):
    read = TokenStream.__anext__
    waiting = {}

    def later(self, request):
        waiting[request] = self.core

    async def first_submit(self):
        core = waiting.pop(self._request, None)
        if core is not None:
            core.send(core.on_add, self._group)
        return await read(self)

    patch.setattr(Submitter, "_send_when_grammar_ready", later)
    patch.setattr(TokenStream, "__anext__", first_submit)


# --- 3 ----------------------------------------------------------------------------------


async def leaving_a_stream_aborts_it(fake):
    async with fake(step_time=0.001).engine() as engine:
        async for _ in engine.stream([1], max_tokens=250):
            break
        await until(lambda: engine.stats().num_aborted == 1 and blocks_are_free(engine), PATIENCE)
        stream = engine.stream([1], max_tokens=250, request_id="x")
        await anext(stream)
        engine.abort("x")
        engine.stream([2], max_tokens=1, request_id="x")
        assert [d async for d in stream][-1].finish_reason == "abort"


def destructors_do_nothing(patch):
    patch.setattr(EngineCore, "abandon", lambda self, request: None)


def an_id_is_free_only_when_the_abort_is_drained(patch):
    patch.setattr(
        Admission, "get_live_group", lambda self, request_id: self._live_groups.get(request_id)
    )
    reserve = Admission.reserve

    def strict(self, request, num_tokens):
        assert request.request_id not in self._live_groups
        reserve(self, request, num_tokens)

    patch.setattr(Admission, "reserve", strict)


# --- 4 ----------------------------------------------------------------------------------


async def a_slow_reader_is_held_back(fake):
    rig = fake()
    async with rig.engine() as engine:
        stream = engine.stream([1], max_tokens=200, max_unread=8, on_slow="pause")
        other = await engine.generate([2], max_tokens=100)
        assert list(other.token_ids) == rig.executor.reference([2], 100)
        assert channel_of(stream).num_unread <= 8
        got = [t async for d in stream for t in d.token_ids]
        assert got == rig.executor.reference([1], 200)


def no_reader_is_held_back(patch):
    patch.setattr(OutputProcessor, "_apply_backpressure", lambda self, request, channel: None)


def reading_does_not_release(patch):
    patch.setattr(EngineCore, "on_reader_caught_up", lambda self, request: None)


# --- 5 ----------------------------------------------------------------------------------


async def the_queue_is_bounded(fake):
    rig = fake(max_num_seqs=1)
    async with rig.engine(max_queued_requests=4) as engine:
        await engine.pause()
        streams = [engine.stream([i], max_tokens=1) for i in range(4 * len(rig.executors))]
        with pytest.raises(EngineOverloadedError):
            engine.stream([9])
        await engine.resume()
        for stream in streams:
            await stream.result()
        await until(lambda: engine.stats().num_waiting == 0, PATIENCE)
        await engine.generate([5], max_tokens=1)


def the_queue_takes_everything(patch):
    patch.setattr(Admission, "_check_room", lambda self, num_requests, num_tokens: None)


def places_are_never_given_back(patch):
    patch.setattr(Admission, "_remove_queued", lambda self, requests: False)


# --- 6 ----------------------------------------------------------------------------------


async def deadlines_are_kept(fake):
    async with fake(step_time=0.002, max_num_seqs=1).engine() as engine:
        engines = range(len(engines_of(engine)))
        running = [engine.stream([1], max_tokens=250, timeout=0.05) for _ in engines]
        queued = [engine.stream([2], max_tokens=5, timeout=0.02) for _ in engines]
        for stream in queued + running:
            with pytest.raises(DeadlineExceededError):
                await stream.result()


def deadlines_pass(patch):
    patch.setattr(EngineCore, "_expire_deadlines", lambda self: None)


# --- 7 ----------------------------------------------------------------------------------


async def one_bad_request_fails_alone(fake):
    rig = fake()
    for executor in rig.executors:
        executor.row_errors["bad"] = ZeroDivisionError("on purpose")
    async with rig.engine() as engine:
        bad = engine.stream([1], request_id="bad")
        good = engine.stream([2], max_tokens=20)
        with pytest.raises(RequestError):
            await bad.result()
        assert list((await good.result()).token_ids) == rig.executor.reference([2], 20)


def a_bad_row_kills_the_step(patch):
    update = Scheduler.update

    def strict(self, step, result):
        for error in result.errors.values():
            raise RuntimeError(error.message)
        return update(self, step, result)

    patch.setattr(Scheduler, "update", strict)


# --- 8 ----------------------------------------------------------------------------------


async def the_host_is_left_alone(fake):
    before = dict(os.environ), {t.name for t in threading.enumerate()}
    async with fake().engine() as engine:
        await engine.generate([1], max_tokens=2)
        assert {t.name for t in threading.enumerate()} - before[1] == {"asyncllm-engine"}
    assert (dict(os.environ), {t.name for t in threading.enumerate()}) == before


def the_environment_is_changed(patch):
    start = EngineThread.start

    def pushy(self):
        patch.setenv("OMP_NUM_THREADS", "7")
        start(self)

    patch.setattr(EngineThread, "start", pushy)


# --- 9 ----------------------------------------------------------------------------------


async def one_wake_is_outstanding(fake):
    async with fake(step_time=0.001).engine() as engine:
        tasks = [asyncio.ensure_future(engine.generate([i], max_tokens=250)) for i in range(8)]
        await asyncio.sleep(0.02)
        hosts = [mailbox_of_this_loop(one).backend for one in engines_of(engine)]
        post, calls = hosts[0].post, []
        for host in hosts:
            host.post = lambda callback: (calls.append(callback), post(callback))
        time.sleep(0.1)
        assert len(calls) <= len(hosts)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def every_delta_wakes(patch):
    deliver = OutputProcessor.deliver

    def eager(self, event, now):
        deliver(self, event, now)
        channel = event[0].group.channel
        if channel.mailbox is not None:
            channel.mailbox._is_call_pending = False
            channel.mailbox.notify([channel])

    patch.setattr(OutputProcessor, "deliver", eager)


# --- 10 ---------------------------------------------------------------------------------


async def a_blocked_loop_does_not_block_the_engine(fake):
    async with fake(step_time=0.001).engine() as engine:
        stream = engine.stream([1], max_tokens=200)
        await anext(stream)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        before = engine.stats().num_steps
        time.sleep(0.15)
        assert engine.stats().num_steps - before > 4
        await task
        await stream.aclose()


def the_engine_waits_for_the_loop(patch):
    notify = LoopMailbox.notify

    def patient(self, channels):
        sent = notify(self, channels)
        while self._is_call_pending and not self.backend.is_closed():
            time.sleep(0.0005)
        return sent

    patch.setattr(LoopMailbox, "notify", patient)


# --- 11 ---------------------------------------------------------------------------------


async def closing_gives_everything_back(fake):
    rig = fake(step_time=0.001)
    engine = rig.engine()
    await engine.start()
    stream = engine.stream([1], max_tokens=250)
    await anext(stream)
    await asyncio.wait_for(engine.aclose(), PATIENCE)
    assert all(executor.closed for executor in rig.executors)
    assert "asyncllm-engine" not in {t.name for t in threading.enumerate()}
    assert [d async for d in stream][-1].finish_reason == "abort"


def the_device_is_kept(patch):
    patch.setattr(FakeExecutor, "close", lambda self: None)


def what_lives_is_waited_for(patch):
    on_close = EngineCore.on_close
    patch.setattr(EngineCore, "on_close", lambda self, drain: on_close(self, 1.9))


# --- 12 ---------------------------------------------------------------------------------


async def results_do_not_depend_on_company(fake):
    rig = fake(num_blocks=20, block_size=4, max_model_len=70, pipeline_depth=2)
    async with rig.engine() as engine:
        # The third finds the first block of the second, and must not find the next, which
        # has the right tokens after the wrong ones.
        for prompt in ([8, 8, 8, 8, 4, 5, 6, 7, 1], [0, 1, 2, 3, 9], [0, 1, 2, 3, 4, 5, 6, 7, 1]):
            result = await engine.generate(prompt, max_tokens=2)
            assert list(result.token_ids) == rig.executor.reference(prompt, 2)
        shared = list(range(8))
        prompts = [shared + [i] * (i + 1) for i in range(8)] + [[9, 9, *shared[2:], 5]]
        streams = [engine.stream(prompt, max_tokens=20) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert list((await stream.result()).token_ids) == rig.executor.reference(prompt, 20)


def a_block_is_known_by_its_own_tokens_alone(patch):
    def hashes(self, block_size):
        full = len(self.token_ids) // block_size
        self.block_hashes = [
            repr(self.token_ids[i * block_size : (i + 1) * block_size]).encode()
            for i in range(full)
        ]
        return self.block_hashes

    patch.setattr(Request, "extend_hashes", hashes)


def late_results_count(patch):
    start_over = Scheduler._reset_for_recompute

    def careless(self, request):
        start_over(self, request)
        request.epoch -= 1

    patch.setattr(Scheduler, "_reset_for_recompute", careless)


# --- all of them ------------------------------------------------------------------------

PROMISES = {
    every_stream_ends: [a_stop_is_not_announced],
    stream_submits_at_once: [submission_waits_for_the_first_read],
    leaving_a_stream_aborts_it: [
        destructors_do_nothing,
        an_id_is_free_only_when_the_abort_is_drained,
    ],
    a_slow_reader_is_held_back: [no_reader_is_held_back, reading_does_not_release],
    the_queue_is_bounded: [the_queue_takes_everything, places_are_never_given_back],
    deadlines_are_kept: [deadlines_pass],
    one_bad_request_fails_alone: [a_bad_row_kills_the_step],
    the_host_is_left_alone: [the_environment_is_changed],
    one_wake_is_outstanding: [every_delta_wakes],
    a_blocked_loop_does_not_block_the_engine: [the_engine_waits_for_the_loop],
    closing_gives_everything_back: [the_device_is_kept, what_lives_is_waited_for],
    results_do_not_depend_on_company: [
        a_block_is_known_by_its_own_tokens_alone,
        late_results_count,
    ],
}


def kept(promise, fake, seconds) -> bool:
    async def main():
        await asyncio.wait_for(promise(fake), seconds)

    try:
        asyncio.run(main())
    except (Exception, pytest.fail.Exception) as error:
        print(f"{promise.__name__}: {error!r}")
        return False
    return True


@pytest.fixture(scope="module")
def packaged():
    """Makes groups of two engines on the packaged model."""
    shared = list(range(8))
    prompts = [[1], [2], [0, 1, 2, 3, 9], [8, 8, 8, 8, 4, 5, 6, 7, 1], [*shared, 1]]
    prompts += [shared + [i] * (i + 1) for i in range(8)] + [[9, 9, *shared[2:], 5]]
    return packaged_group(prompts, 200)


@pytest.mark.parametrize("make", ["engine", "group", "packaged"])
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_kept(promise, make, request):
    makers = {"engine": fake, "group": fake_group}
    maker = makers[make] if make in makers else request.getfixturevalue(make)
    assert kept(promise, maker, 3 * PATIENCE)


@pytest.mark.parametrize(
    ("promise", "breakage"),
    [(promise, breakage) for promise, all_of in PROMISES.items() for breakage in all_of],
    ids=lambda one: one.__name__,
)
def test_a_broken_engine_is_noticed(promise, breakage, monkeypatch, caplog):
    breakage(monkeypatch)
    assert not kept(promise, fake, PATIENCE)


ANYIO = "anyio._backends._asyncio"
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "rich", "asyncio", ANYIO}
HEAVY |= {"prometheus_client", "opentelemetry", "langchain_core"}


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return HEAVY & set(out.stdout.split())


def test_import_is_cheap_and_check_detects_heavy_import():
    assert loaded_by("import asyncllm; asyncllm.SamplingParams()") == set()
    assert "langchain_core" not in loaded_by("import asyncllm.callbacks")
    # Not at the first use of anyio, which is start() on the application's loop.
    assert loaded_by("import asyncllm; asyncllm.AsyncLLMEngine()") == {"asyncio", ANYIO}
    assert loaded_by("import asyncllm, numpy") == {"numpy"}
