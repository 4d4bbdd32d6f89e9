"""LLM, the synchronous facade, on the fake executor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from asyncllm import (
    LLM,
    AsyncLLMEngine,
    ContextLengthExceededError,
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestError,
    SamplingParams,
)
from tests.fakes import channel_of, fake
from tests.idle import blocking_until


@pytest.fixture
def make(monkeypatch):
    """An LLM of its own on a fake; closed in the end."""
    made = []

    def make(rig, **overrides):
        class Engine(AsyncLLMEngine):
            def __init__(self, model=None, *, config=None, **settings):
                super().__init__(model, config=config, **settings)
                self._loader = rig.load

        monkeypatch.setattr("asyncllm.llm.AsyncLLMEngine", Engine)
        made.append(LLM(**overrides))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def say(text):
    return [{"role": "user", "content": text}]


def expected(rig, prompts, count):
    return [rig.executor.reference(prompt, count) for prompt in prompts]


def tokens(results):
    return [list(result.token_ids) for result in results]


def test_one_prompt_gives_one_completion(make):
    rig = fake()
    llm = make(rig)
    for prompt in ("4 5", [4, 5], (4, 5), np.array([4, 5]), range(4, 6)):
        result = llm.generate(prompt, max_tokens=3)
        assert result.prompt_token_ids == (4, 5)
        assert list(result.token_ids) == rig.executor.reference([4, 5], 3)
        assert result.finish_reason == "length"
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (2, 3)


def test_a_batch_runs_as_one_and_keeps_its_order(make):
    # Slow enough for all six to be there before the first has ended.
    rig = fake(record=True, step_time=0.02)
    llm = make(rig)
    prompts = [[i, i + 1] for i in range(6)]
    assert tokens(llm.generate(prompts, max_tokens=5)) == expected(rig, prompts, 5)
    assert max(len(batch) for batch in rig.executor.batches) > 1
    assert tokens(llm.generate(np.array(prompts), max_tokens=5)) == expected(rig, prompts, 5)
    assert tokens(llm.generate(["1 2", [3]], max_tokens=2)) == expected(rig, [[1, 2], [3]], 2)
    assert llm.generate([]) == []


def test_params_for_all_or_one_for_each(make):
    rig = fake()
    llm = make(rig)
    same = llm.generate([[1], [2]], SamplingParams(max_tokens=2))
    assert tokens(same) == expected(rig, [[1], [2]], 2)
    each = llm.generate([[1], [2]], [SamplingParams(max_tokens=n) for n in (1, 4)])
    assert [len(result.token_ids) for result in each] == [1, 4]
    wins = llm.generate([[1], [2]], SamplingParams(max_tokens=9), max_tokens=3)
    assert [len(result.token_ids) for result in wins] == [3, 3]
    with pytest.raises(InvalidRequestError, match="1 for 2 prompts") as caught:
        llm.generate([[1], [2]], [SamplingParams()])
    assert caught.value.param == "sampling_params"
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        llm.generate([1], [SamplingParams()])


def test_chat_one_and_batch(make):
    rig = fake()
    llm = make(rig)
    one = llm.chat(say("7 8"), max_tokens=3)
    assert list(one.token_ids) == rig.executor.reference([7, 8], 3)
    assert tokens(llm.chat([say("7 8"), say("9")], max_tokens=3)) == expected(rig, [[7, 8], [9]], 3)
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(say("7"), tools=[{}])
    assert caught.value.param == "tools"


def test_stream_is_a_plain_iterator(make):
    rig = fake(gate=1)
    llm = make(rig)
    stream = llm.stream([4], max_tokens=5, request_id="mine")
    first = next(stream)
    assert (stream.request_id, stream.finish_reason, stream.usage) == ("mine", None, None)
    rig.executor.gate.release(100)
    rest = list(stream)
    assert [t for d in (first, *rest) for t in d.token_ids] == rig.executor.reference([4], 5)
    assert rest[-1].finish_reason == stream.finish_reason == "length"
    assert stream.usage.completion_tokens == 5
    assert list(stream) == []
    assert list(stream.result().token_ids) == rig.executor.reference([4], 5)
    chat = llm.stream_chat(say("1 2"), max_tokens=2)
    assert list(chat.result().token_ids) == rig.executor.reference([1, 2], 2)


@pytest.mark.parametrize("leave", ["close", "with", "abort", "del"])
def test_leaving_a_stream_aborts_it(make, leave):
    rig = fake(gate=3)
    llm = make(rig)
    stream = llm.stream([1], max_tokens=200)
    next(stream)
    if leave == "close":
        stream.close()
        assert next(stream, None) is None
    elif leave == "with":
        with stream:
            pass
        assert next(stream, None) is None
    elif leave == "abort":
        stream.abort()
        rig.executor.gate.release(1)
        assert stream.result().finish_reason == "abort"
    else:
        del stream
        gc.collect()
    rig.executor.gate.release(1000)
    # The next request is behind the abort in the queue.
    llm.generate([2], max_tokens=1)
    stats = llm.stats()
    assert (stats.num_aborted, stats.num_finished) == (1, 1)
    assert stats.num_free_blocks == stats.num_blocks


def test_a_batch_may_be_larger_than_the_queue(make):
    rig = fake(max_num_seqs=2)
    llm = make(rig, max_queued_requests=3)
    prompts = [[i] for i in range(40)]
    assert tokens(llm.generate(prompts, max_tokens=4)) == expected(rig, prompts, 4)
    stats = llm.stats()
    assert (stats.num_finished, stats.num_aborted) == (40, 0)
    assert stats.num_rejected > 0


def test_a_batch_that_has_not_begun_is_refused(make):
    rig = fake(max_num_seqs=1, gate=0)
    llm = make(rig, max_queued_requests=1)
    held = [llm.stream([1], max_tokens=1)]
    while len(held) < 2:
        # There is room once the first one runs.
        with contextlib.suppress(EngineOverloadedError):
            held.append(llm.stream([1], max_tokens=1))
        time.sleep(0.001)
    before = llm.stats().num_rejected
    with pytest.raises(EngineOverloadedError) as caught:
        llm.stream([1], max_tokens=1)
    assert caught.value.retry_after > 0
    with pytest.raises(EngineOverloadedError):
        llm.generate([[2], [3]])
    assert llm.stats().num_rejected - before == 2
    assert llm.stats().num_requests == len(held)
    rig.executor.gate.release(10)
    assert {stream.result().finish_reason for stream in held} == {"length"}


def test_many_threads_at_once(make):
    rig = fake(max_num_seqs=4)
    llm = make(rig, max_queued_requests=500)

    def work(i):
        prompts = [[i, j] for j in range(5)]
        return tokens(llm.generate(prompts, max_tokens=6)) == expected(rig, prompts, 6)

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(work, range(12))) == [True] * 12


def test_a_stream_has_one_reader_at_a_time(make):
    rig = fake(gate=0)
    llm = make(rig)
    stream = llm.stream([1], max_tokens=1)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(stream.result)
        blocking_until(lambda: channel_of(stream._stream).has_reader)
        with pytest.raises(RuntimeError, match="another thread"):
            next(stream)
        rig.executor.gate.release()
    assert other.result().finish_reason == "length"


def test_below_a_running_loop_and_on_a_borrowed_engine():
    rig = fake()

    async def main():
        async with rig.engine() as engine:
            with LLM(engine=engine) as llm:
                assert tokens(llm.generate([[1], [2]], max_tokens=3)) == expected(
                    rig, [[1], [2]], 3
                )
            # Borrowed: it is still open.
            assert (await engine.generate([3], max_tokens=1)).finish_reason == "length"
            threaded = await asyncio.to_thread(llm.generate, [4], max_tokens=2)
            assert list(threaded.token_ids) == rig.executor.reference([4], 2)
        with pytest.raises(EngineClosedError):
            llm.generate([1])

    asyncio.run(main())


def test_an_engine_is_borrowed_running_and_without_settings():
    engine = fake().engine()
    with pytest.raises(EngineClosedError, match="is new"):
        LLM(engine=engine)
    for settings in ({"model": "x"}, {"max_num_seqs": 2}):
        with pytest.raises(InvalidRequestError) as caught:
            LLM(engine=engine, **settings)
        assert caught.value.param == "engine"


def test_first_error_aborts_the_rest_at_once(make):
    rig = fake(max_num_seqs=8, gate=0)
    rig.executor.row_errors["bad"] = ValueError("not a number")
    llm = make(rig)
    submit = llm.engine.stream

    def named(prompt, params, **options):
        return submit(prompt, params, request_id="bad" if prompt == [1] else None, **options)

    llm.engine.stream = named
    rig.executor.gate.release(3)
    with pytest.raises(RequestError, match="not a number") as caught:
        llm.generate([[0], [1], [2], [3]], [SamplingParams(max_tokens=n) for n in (1, 9, 200, 200)])
    rig.executor.gate.release(1000)
    assert llm.generate([7], max_tokens=1).finish_reason == "length"
    stats = llm.stats()
    assert caught.value is not None
    assert (stats.num_failed, stats.num_aborted, stats.num_finished) == (1, 2, 2)
    assert stats.num_free_blocks == stats.num_blocks


def test_a_bad_prompt_in_a_batch_leaves_nothing_behind(make):
    llm = make(fake(max_model_len=20))
    with pytest.raises(ContextLengthExceededError) as caught:
        llm.generate([[1], [2] * 30], max_tokens=10)
    llm.generate([3], max_tokens=1)
    stats = llm.stats()
    assert stats.num_requests == 2
    assert stats.num_free_blocks == stats.num_blocks
    assert str(caught.value).startswith("prompts[1]: prompt: has 30 tokens")


def test_an_error_names_its_conversation_and_no_single_prompt(make):
    llm = make(fake())
    with pytest.raises(InvalidRequestError, match=r"^messages\[2\]: messages\[0\]: is"):
        llm.chat([[{"role": "user", "content": "1"}]] * 2 + [["x"]], max_tokens=2)
    with pytest.raises(InvalidRequestError, match=r"^prompt=-1: expected"):
        llm.generate([-1])


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, {1, 2}, b"ab", (i for i in [1])])
def test_prompts_have_to_be_a_sequence(make, prompts):
    llm = make(fake())
    with pytest.raises(InvalidRequestError, match="expected a sequence") as caught:
        llm.generate(prompts)
    assert caught.value.param == "prompts"
    with pytest.raises(InvalidRequestError, match="expected a sequence") as caught:
        llm.chat(prompts)
    assert caught.value.param == "messages"


def test_deadline_error_has_partial_output(make):
    rig = fake(gate=2)
    llm = make(rig)
    stream = llm.stream([1], max_tokens=50, timeout=0.3)
    got = [next(stream)]
    while sum(len(delta.token_ids) for delta in got) < 2:
        got.append(next(stream))
    threading.Timer(0.35, rig.executor.gate.release, (100,)).start()
    with pytest.raises(DeadlineExceededError) as caught:
        list(stream)
    with pytest.raises(DeadlineExceededError):
        stream.result()
    partial = caught.value.partial
    assert list(partial.token_ids) == rig.executor.reference([1], len(partial.token_ids))


def test_close_aborts_live_requests(make):
    rig = fake(step_time=0.01)
    llm = make(rig)
    stream = llm.stream([1], max_tokens=250)
    next(stream)
    llm.close()
    llm.close()
    assert stream.result().finish_reason == "abort"
    assert rig.executor.closed
    for call in (lambda: llm.generate([1]), lambda: llm.stream([1]), llm.stats):
        with pytest.raises(EngineClosedError):
            call()


def test_the_death_of_the_engine_reaches_every_thread(make):
    rig = fake(gate=0)
    lost = rig.executor.faults[0] = RuntimeError("device lost")
    llm = make(rig)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(llm.generate, [[i], [i]], max_tokens=5) for i in range(4)]
        blocking_until(lambda: llm.stats().num_requests == 8)
        rig.executor.gate.release(100)
    for future in asked:
        assert isinstance(future.exception(), EngineDeadError)
        assert future.exception().__cause__ is lost
    with pytest.raises(EngineDeadError):
        llm.generate([1])


def test_waiting_thread_notices_hung_step(make, caplog):
    rig = fake(gate=0)
    llm = make(rig, step_timeout=0.1)
    with pytest.raises(EngineDeadError, match="asyncllm-engine"):
        llm.generate([1])
    assert "longer than step_timeout=0.1 s" in caplog.text
    llm.close()
    rig.executor.gate.release(10)


def test_health_is_that_of_the_engine(make):
    rig = fake()
    lost = rig.executor.faults[1] = RuntimeError("device lost")
    llm = make(rig)
    assert (llm.state, llm.error) == ("running", None)
    with pytest.raises(EngineDeadError):
        llm.generate([1], max_tokens=9)
    assert (llm.state, llm.error.__cause__) == ("dead", lost)
    llm.close()
    assert (llm.state, llm.error.__cause__) == ("closed", lost)


def test_a_start_that_fails_raises_and_leaves_nothing(make):
    rig = fake()
    rig.load_error = InvalidRequestError("dtype: no", param="dtype")
    with pytest.raises(InvalidRequestError, match="dtype: no"):
        make(rig)


def test_interrupt_aborts_the_interrupted_call(make, monkeypatch):
    rig = fake(gate=1)
    llm = make(rig)
    stream = llm.stream([1], max_tokens=200)
    next(stream)
    with monkeypatch.context() as patch:

        def interrupted(self, waiter):
            raise KeyboardInterrupt

        patch.setattr("asyncllm.runtime.mailbox.ThreadMailbox.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    rig.executor.gate.release(1000)
    llm.generate([2], max_tokens=1)
    assert llm.stats().num_aborted == 1


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "progress", "batch", "shown"),
    [
        (True, None, True, True),
        (False, None, True, False),
        (True, False, True, False),
        (False, True, True, True),
        (True, None, False, False),
        (True, True, False, True),
    ],
)
def test_the_bar_is_shown_on_a_terminal_or_on_demand(
    make, monkeypatch, terminal, progress, batch, shown
):
    monkeypatch.setenv("TERM", "xterm")
    llm = make(fake())
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    llm.generate([[1], [2], [3]] if batch else [1], max_tokens=1, progress=progress)
    llm.chat([say("1")] if batch else say("1"), max_tokens=1, progress=progress)
    monkeypatch.undo()
    assert bool(screen.getvalue()) == shown
    if shown:
        assert ("3/3" if batch else "1/1") in screen.getvalue()


def test_no_standard_error_is_no_terminal(make, monkeypatch):
    llm = make(fake())
    monkeypatch.setattr(sys, "stderr", None)
    assert len(llm.generate([[1], [2]], max_tokens=1)) == 2
