"""EngineCore turn by turn, on a clock and an inbox of the test's own: what it does and how long it
would wait, without a thread."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import weakref
from collections import deque

import pytest

from asyncllm.core.admission import Admission
from asyncllm.core.calls_between_steps import CallsBetweenSteps
from asyncllm.core.channel import Channel, StreamEnd
from asyncllm.core.deadlines import DeadlineExceededError
from asyncllm.core.engine_core import CLOSED_MESSAGE, EngineCore
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.core.output_processor import DetokenizerState
from asyncllm.core.request import Request, RequestGroup, Status
from asyncllm.core.scheduler import Scheduler
from asyncllm.core.tracebacks import clear_frames, replace_tracebacks_by_note
from asyncllm.errors import (
    EngineClosedError,
    EngineDeadError,
    KVCacheTooSmallError,
    RequestError,
)
from asyncllm.sampling_params import SamplingParams
from asyncllm.testing import FakeExecutor
from tests.fakes import FakeTokenizer, fake

TOKENIZER = FakeTokenizer()


class Inbox:
    """A queue whose waits take no time: they are noted, and set the clock."""

    def __init__(self, rig):
        self.commands = deque()
        self.waits: list[float | None] = []
        self.rig = rig

    def put(self, command):
        self.commands.append(command)

    def get_nowait(self):
        if not self.commands:
            raise queue.Empty
        return self.commands.popleft()

    def get(self, timeout=None):
        self.waits.append(timeout)
        if self.commands:
            return self.commands.popleft()
        if timeout is not None:
            self.rig.now += timeout
        raise queue.Empty


def noting(name):
    def method(self, *args):
        self.calls.append(name)
        self.rig.now += self.seconds * (name == "collect")
        return getattr(FakeExecutor, name)(self, *args)

    return method


class Device(FakeExecutor):
    """Notes what it is asked for. A step takes ``seconds`` of the rig's clock."""

    def __init__(self, info, rig):
        super().__init__(info)
        self.rig, self.seconds = rig, 0.0
        self.calls: list[str] = []

    launch, collect, discard, close = map(noting, ("launch", "collect", "discard", "close"))


class Rig:
    def __init__(self, *, depth=1, **limits):
        self.now = 100.0
        sizes = {"num_blocks": 33, "max_num_seqs": 4, "max_num_batched_tokens": 32} | limits
        info = fake(pipeline_depth=depth, **sizes).info
        self.device = Device(info, self)
        self.admission = Admission(100, 10_000, self.clock)
        self.scheduler = Scheduler(info)
        self.core = EngineCore(self.device, self.scheduler, self.admission, clock=self.clock)
        self.core.inbox = self.inbox = Inbox(self)
        self.core._calls_between_steps = CallsBetweenSteps(self.inbox, self.core.shutdown_error)

    def clock(self):
        return self.now

    def make(self, request_id, prompt=(1, 2, 3), max_tokens=4, **options):
        channel = Channel(
            max_unread=options.pop("max_unread", 256), on_slow=options.pop("on_slow", "coalesce")
        )
        group = RequestGroup(request_id, channel, arrived_at=self.now, **options)
        request = Request(
            group,
            SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0),
            token_ids=list(prompt),
            max_model_len=128,
            output=DetokenizerState(TOKENIZER.decode, TOKENIZER.detokenizer(SamplingParams())),
        )
        self.admission.reserve(group, len(prompt))
        return request

    def submit(self, request_id, *args, **options):
        request = self.make(request_id, *args, **options)
        self.core.send(self.core.on_add, request.group)
        return request

    def turns(self, count):
        for _ in range(count):
            self.core.step()

    def turn_until_closed(self, limit=100):
        for _ in range(limit):
            if self.core.closed:
                return
            self.core.step()
        raise AssertionError("the engine does not close")


def test_steps_that_admit_a_request_do_not_set_the_pace():
    """A prompt of one token, or a copy of a prompt, is a decode row as well."""
    rig, recorded = Rig(), []
    rig.scheduler.pace.record_decode_step = recorded.append
    rig.submit("a", [1], max_tokens=3)
    rig.turns(1)
    assert len(recorded) == 0
    rig.turns(1)
    assert len(recorded) == 1


def end_of(request):
    """The reason of a request's end, or its exception; None while it lives."""
    final = request.group.channel.stream_end
    return final.finish_reason if isinstance(final, StreamEnd) else final


def test_one_step_at_a_time_is_launched_and_collected():
    rig = Rig()
    request = rig.submit("a", max_tokens=3)
    rig.turns(1)
    assert rig.device.calls == ["launch", "collect"]
    rig.turns(2)
    assert rig.device.calls == ["launch", "collect"] * 3
    assert end_of(request) == "length"
    assert request.output_token_ids == rig.device.reference([1, 2, 3], 3)
    rig.turns(1)
    assert rig.device.calls == ["launch", "collect"] * 3
    assert rig.inbox.waits == [None]


def test_depth_two_launches_second_before_collecting_first():
    rig = Rig(depth=2)
    request = rig.submit("a", max_tokens=3)
    rig.turns(1)
    assert rig.device.calls == ["launch"]
    rig.turns(1)
    assert rig.device.calls == ["launch", "launch", "collect"]
    rig.turns(1)
    assert rig.device.calls == ["launch", "launch", "collect", "launch", "collect"]
    rig.turns(1)
    assert rig.device.calls[5:] == ["collect"]
    assert end_of(request) == "length"
    assert request.output_token_ids == rig.device.reference([1, 2, 3], 3)


def test_a_step_lasts_from_its_launch_to_its_result():
    rig = Rig(depth=2)
    rig.device.seconds = 3.0
    rig.submit("a", max_tokens=60)
    rig.turns(1)
    rig.now += 1.0
    rig.turns(1)
    assert rig.core.stats().last_step_time == 4.0


def test_request_leaves_queue_at_its_first_launch():
    rig = Rig(max_num_seqs=1)
    first, second = rig.submit("a", max_tokens=2), rig.submit("b", max_tokens=1)
    rig.now += 3.0
    rig.turns(1)
    assert (first.first_scheduled_at, second.first_scheduled_at) == (103.0, None)
    assert len(rig.admission.queued_requests) == 1
    rig.now += 4.0
    rig.turns(2)
    assert (first.first_scheduled_at, second.first_scheduled_at) == (103.0, 107.0)
    assert len(rig.admission.queued_requests) == 0
    usage = second.group.channel.stream_end.usage
    assert (usage.queue_time, usage.ttft, usage.total_time) == (7.0, 7.0, 7.0)


def test_request_too_large_ends_and_next_runs():
    rig = Rig(num_blocks=5, max_model_len=128)
    large, small = rig.submit("large", range(30)), rig.submit("small", max_tokens=1)
    rig.turns(2)
    assert isinstance(end_of(large), KVCacheTooSmallError)
    assert end_of(small) == "length"
    assert rig.scheduler.failed == []
    rig = Rig(num_blocks=5, max_model_len=128)
    large = rig.submit("large", range(30))
    rig.turns(2)
    assert isinstance(end_of(large), KVCacheTooSmallError)
    assert rig.device.calls == []


def test_stats():
    rig = Rig(max_num_seqs=2)
    rig.device.seconds = 0.25
    running = rig.submit("a", range(8), max_tokens=9)
    rig.submit("b", range(8), max_tokens=1)
    rig.submit("c", range(20, 24), max_tokens=2)
    paused = rig.submit("d", range(30, 34), max_tokens=9)
    rig.turns(1)
    rig.core.send(rig.scheduler.pause, paused)
    rig.turns(1)
    rig.scheduler.num_preemptions, rig.admission.num_rejected = 5, 7
    stats = rig.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_paused) == (2, 0, 1)
    assert (stats.num_blocks, stats.num_free_blocks) == (32, 28)
    assert stats.kv_cache_usage == pytest.approx(4 / 32)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8 + 8 + 4, 4)
    assert (stats.prompt_tokens, stats.generation_tokens) == (8 + 8 + 4, 2 + 1 + 1)
    assert (stats.num_steps, stats.last_step_time) == (2, 0.25)
    assert (stats.num_requests, stats.num_rejected, stats.num_preemptions) == (4, 7, 5)
    assert (stats.num_finished, stats.num_aborted, stats.num_failed) == (1, 0, 0)
    rig.core.abort(running.group)
    rig.turns(1)
    assert rig.core.stats().num_aborted == 1
    rig.core.output_processor.fail(paused.group, RequestError("bad"))
    assert rig.core.stats().num_failed == 1


def test_stats_of_a_dead_engine_hold_nothing():
    rig = Rig()
    rig.submit("a")
    rig.scheduler.pause(rig.submit("b"))
    rig.device.faults[1] = OSError("gone")
    rig.core.run()
    stats = rig.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_paused) == (0, 0, 0)
    assert (stats.num_blocks, stats.num_free_blocks, stats.kv_cache_usage) == (32, 32, 0.0)


def test_stats_report_queued_tokens_and_token_rate():
    rig = Rig(depth=2, max_num_seqs=1)
    rig.device.seconds = 0.5
    assert rig.core.stats().prompt_tokens_per_second == 0.0
    rig.submit("a", range(20), max_tokens=3)
    rig.submit("b", range(7), max_tokens=1)
    rig.make("being tokenised", range(5))
    assert rig.core.stats().num_queued_tokens == 20 + 7 + 5
    rig.turns(1)
    assert rig.core.stats().num_queued_tokens == 7 + 5
    rig.turns(1)
    rig.turns(3)
    # Steps of 20, 1, 1 and 7 tokens took half a second each: a token takes no time of its own.
    assert rig.core.stats().prompt_tokens_per_second == 0.0
    for number, length in enumerate((20, 3, 11, 20, 6) * 4):
        rig.device.seconds = 0.1 + length * 0.05
        rig.submit(f"{number}", range(100 * number, 100 * number + length), max_tokens=1)
        rig.turns(3)
    assert rig.core.stats().prompt_tokens_per_second == pytest.approx(20.0, rel=0.3)
    assert rig.core.stats().is_paused is False
    rig.core.set_suspended(True)
    assert rig.core.stats().is_paused is True
    rig.submit("c", range(9), max_tokens=1)
    rig.device.faults[rig.core.stats().num_steps] = OSError("gone")
    rig.core.set_suspended(False)
    rig.core.run()
    assert (rig.core.stats().num_queued_tokens, rig.core.stats().num_waiting) == (0, 0)


def test_waiting_requests_exclude_running_and_paused():
    rig = Rig(max_num_seqs=1)
    for name in "abc":
        rig.submit(name)
    rig.make("being tokenised", ())
    rig.turns(1)
    assert rig.core.stats().num_waiting == 3


def test_an_abort_is_sent_once_and_overtakes_the_arrival():
    rig = Rig()
    request = rig.make("a")
    rig.core.abort(request.group)
    rig.core.abort(request.group)
    assert len(rig.inbox.commands) == 1
    rig.core.send(rig.core.on_add, request.group)
    rig.turns(1)
    assert (end_of(request), rig.device.calls) == ("abort", [])
    other = rig.make("b")
    other.group.cancelled = True
    rig.core.on_add(other.group)
    assert end_of(other) == "abort"


def test_a_request_that_arrives_twice_is_added_once():
    rig = Rig()
    request = rig.submit("a")
    rig.core.send(rig.core.on_add, request.group)
    rig.turns(1)
    assert list(rig.scheduler.requests()) == [request]
    # Once it runs, and once it ended, too.
    rig.core.on_add(request.group)
    assert list(rig.scheduler.requests()) == [request]
    rig.core.output_processor.fail(request.group, RequestError("bad"))
    rig.core.on_add(request.group)
    assert list(rig.scheduler.requests()) == []


def test_a_destructor_aborts_in_its_own_process_only(monkeypatch):
    rig = Rig()
    request = rig.submit("a")
    rig.turns(1)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: rig.core.pid + 1)
        rig.core.abandon(request.group)
    assert not request.group.cancelled
    rig.core.abandon(request.group)
    rig.turns(1)
    assert end_of(request) == "abort"


@pytest.mark.parametrize("seconds", [2.0, 50.0, 3600.0])
def test_the_engine_waits_for_the_next_deadline(seconds):
    rig = Rig()
    rig.core.set_suspended(True)
    late = rig.submit("a", deadline=rig.now + seconds + 1.0)
    early = rig.submit("b", deadline=rig.now + seconds)
    rig.turns(1)
    assert rig.inbox.waits == [seconds]
    rig.turns(1)
    assert isinstance(end_of(early), DeadlineExceededError)
    assert str(end_of(early)) == (
        f"request 'b' passed its deadline while waiting, {seconds:.3f} s after it was submitted"
    )
    assert rig.inbox.waits == [seconds, 1.0]
    rig.turns(1)
    assert isinstance(end_of(late), DeadlineExceededError)
    assert rig.inbox.waits == [seconds, 1.0, None]


def test_no_wait_is_longer_than_an_hour():
    rig = Rig()
    rig.core.set_suspended(True)
    rig.submit("a", deadline=rig.now + 5000.0)
    rig.turns(2)
    assert rig.inbox.waits == [3600.0, 1400.0]


@pytest.mark.parametrize("late", [0.0, 100.0])
def test_passed_deadline_is_not_awaited(late):
    rig = Rig()
    rig.core.set_suspended(True)
    request = rig.submit("a", deadline=rig.now + 2.0)
    rig.core.send(rig.core.set_suspended, True)
    rig.turns(1)
    rig.now = 102.0 + late
    rig.core._wait_for_command()
    assert rig.inbox.waits == [2.0, 0.0]
    rig.turns(1)
    assert isinstance(end_of(request), DeadlineExceededError)


def test_deadline_error_names_the_phase():
    rig = Rig()
    running = rig.submit("a", max_tokens=50, deadline=rig.now + 5.0)
    unknown = rig.make("b", (), deadline=rig.now + 5.0)
    rig.core.send(rig.core.on_add_deadline, unknown.group)
    rig.turns(2)
    rig.now += 4.999
    rig.turns(1)
    assert end_of(running) is None
    rig.now = 105.0
    rig.turns(1)
    assert "passed its deadline while running, 5.000 s" in str(end_of(running))
    assert "passed its deadline while being tokenised, 5.000 s" in str(end_of(unknown))
    partial = end_of(running).partial
    assert partial.outputs[0].token_ids == tuple(rig.device.reference([1, 2, 3], 3))
    assert partial.outputs[0].text == TOKENIZER.decode(rig.device.reference([1, 2, 3], 3))
    assert partial.prompt_token_ids == (1, 2, 3)
    assert (partial.usage.completion_tokens, partial.usage.total_time) == (3, 5.0)
    assert end_of(unknown).partial is None


def test_a_deadline_is_watched_once_and_only_if_there_is_one():
    rig = Rig()
    rig.submit("a")
    request = rig.submit("b", deadline=rig.now + 5.0)
    rig.core.send(rig.core.on_add_deadline, request.group)
    rig.turns(1)
    assert list(rig.core._deadlines.expire(rig.now + 5.0)) == [request.group]


def test_ended_requests_are_freed_before_their_deadlines():
    rig = Rig()
    live = rig.make("live", (), deadline=rig.now + 1e6)
    rig.core.on_add_deadline(live.group)
    for i in range(200):
        # Behind the one that lives, so that no look at the first of them finds it.
        rig.submit(f"r{i}", max_tokens=1, deadline=rig.now + 2e6)
        rig.turns(1)
    assert len(rig.core._deadlines) <= 66
    rig.now += 1e6
    rig.turns(1)
    assert isinstance(end_of(live), DeadlineExceededError)


def test_immediate_close_aborts_live_requests():
    rig = Rig()
    request = rig.submit("a", max_tokens=50)
    rig.turns(3)
    rig.core.send(rig.core.on_close, 0.0)
    rig.core.run()
    assert end_of(request) == "abort"
    assert request.group.cancelled
    assert rig.device.closed
    with pytest.raises(EngineClosedError, match=CLOSED_MESSAGE):
        rig.make("b")
    assert isinstance(rig.core.call(int).exception(0), EngineClosedError)


@pytest.mark.parametrize("drains", [(3.0,), (3.0, 9.0), (9.0, 3.0), (None, 3.0), (3.0, None)])
def test_the_earliest_end_that_was_asked_for_counts(drains):
    rig = Rig()
    rig.device.seconds = 1.0
    request = rig.submit("a", max_tokens=50)
    for drain in drains:
        rig.core.send(rig.core.on_close, drain)
    rig.core.run()
    assert end_of(request) == "abort"
    # One token at 101, 102 and 103, when its time is up.
    assert request.num_output_tokens == 3


def test_close_waits_for_tokenisation():
    rig = Rig()
    request = rig.make("a", ())
    rig.core.send(rig.core.on_close, 7.0)
    rig.turns(2)
    assert rig.inbox.waits == [7.0]
    rig.turn_until_closed()
    assert end_of(request) == "abort"


def test_paused_requests_hold_up_the_end_for_a_second():
    rig = Rig()
    paused, other = rig.submit("a", max_tokens=50), rig.submit("b", max_tokens=4)
    rig.turns(1)
    rig.core.send(rig.scheduler.pause, paused)
    rig.core.send(rig.core.on_close, 60.0)
    rig.turns(3)
    assert end_of(other) == "length"
    assert rig.inbox.waits == []
    rig.turns(1)
    assert rig.inbox.waits == [1.0]
    rig.core.send(rig.scheduler.resume, paused)
    rig.turns(1)
    assert paused.status is Status.RUNNING
    rig.core.send(rig.scheduler.pause, paused)
    rig.now += 0.5
    rig.turns(1)
    # The second begins anew.
    assert rig.inbox.waits == [1.0, 1.0]
    assert end_of(paused) is None
    rig.turns(1)
    assert end_of(paused) == "abort"
    assert rig.core.closed


def test_a_paused_request_alone_does_not_close_an_open_engine():
    rig = Rig()
    rig.scheduler.pause(rig.make("a"))
    rig.turns(2)
    assert rig.inbox.waits == [None, None]


def test_suspended_engine_schedules_nothing_until_it_closes():
    rig = Rig()
    rig.core.set_suspended(True)
    request = rig.submit("a", max_tokens=2)
    rig.turns(2)
    assert (rig.device.calls, rig.inbox.waits) == ([], [None, None])
    rig.core.set_suspended(False)
    rig.turns(1)
    assert rig.device.calls == ["launch", "collect"]
    rig.core.set_suspended(True)
    rig.core.on_close(None)
    rig.core.set_suspended(True)
    rig.core.run()
    assert end_of(request) == "length"


def test_suspended_engine_collects_steps_in_flight():
    rig = Rig(depth=2)
    rig.submit("a", max_tokens=9)
    rig.turns(1)
    rig.core.set_suspended(True)
    rig.turns(1)
    assert rig.device.calls == ["launch", "collect"]
    rig.turns(1)
    assert rig.inbox.waits == [None]


def test_a_call_runs_with_no_step_in_flight():
    rig = Rig(depth=2)
    rig.submit("a", max_tokens=9)
    rig.turns(2)
    seen = []
    future = rig.core.call(lambda *args: seen.append((*args, len(rig.core._in_flight))) or 5, 1, 2)
    rig.turns(1)
    assert not future.done()
    rig.turns(1)
    assert future.result(0) == 5
    assert seen == [(1, 2, 0)]
    assert not rig.core._calls_between_steps._unfinished_futures
    assert rig.device.calls[-1] == "launch"


def test_device_error_ends_engine_and_every_call():
    rig = Rig()

    def fails():
        raise ZeroDivisionError("in a call")

    futures = [rig.core.call(run) for run in (int, fails, int)]
    rig.core.run()
    assert futures[0].result(0) == 0
    for future in [*futures[1:], rig.core.call(int)]:
        error = future.exception(0)
        assert isinstance(error, EngineDeadError)
        assert isinstance(error.__cause__, ZeroDivisionError)
    assert rig.device.closed


def test_a_failing_step_ends_everything():
    rig = Rig()
    running, waiting = rig.submit("a"), rig.make("b", ())
    rig.device.faults[1] = OSError("gone")
    rig.core.run()
    for request in (running, waiting):
        assert isinstance(end_of(request), EngineDeadError)
        assert "OSError: gone" in str(end_of(request))
        assert end_of(request).__cause__ is rig.core.fatal_error
        assert request.group.cancelled
    assert rig.device.calls[-1] == "close"
    assert not rig.core.is_hung
    assert not rig.core._in_flight
    assert rig.admission.num_live_requests == 0
    # The frames that it was raised among hold requests, and are let go.
    traceback = rig.core.fatal_error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
        assert traceback.tb_frame.f_locals == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_out_of_memory_step_is_retried_smaller(depth):
    rig = Rig(depth=depth)
    rig.device.faults[0] = StepOutOfMemoryError("16 tokens")
    request = rig.submit("a", range(16), max_tokens=110)
    rig.turns(depth)
    assert rig.device.calls[-1] == "discard"
    assert rig.scheduler.budget.tokens == 8
    assert not rig.core._in_flight
    assert end_of(request) is None
    done = rig.core.stats().num_steps
    for budget in (8, 16, 32):
        assert rig.scheduler.budget.tokens == budget
        while rig.core.stats().num_steps < done + 31:
            rig.turns(1)
        assert rig.scheduler.budget.tokens == budget
        while rig.core.stats().num_steps < done + 32:
            rig.turns(1)
        done += 32
    assert rig.scheduler.budget.tokens == 32
    assert request.num_output_tokens > 90
    assert request.output_token_ids == rig.device.reference(range(16), request.num_output_tokens)


def test_a_step_that_cannot_be_made_smaller_ends_its_request():
    rig = Rig()
    alone, waiting = rig.submit("a", [1], max_tokens=9), rig.submit("b", [5] * 7, max_tokens=1)
    rig.scheduler.pause(waiting)
    rig.turns(1)
    error = StepOutOfMemoryError("one token")
    rig.device.faults[1] = error
    rig.turns(1)
    assert isinstance(end_of(alone), RequestError)
    assert "request 'a': the device has too little memory" in str(end_of(alone))
    assert end_of(alone).__cause__ is error
    rig.core.send(rig.scheduler.resume, waiting)
    rig.core.send(rig.core.on_add, waiting.group)
    rig.turns(1)
    assert end_of(waiting) == "length"


def test_a_launch_without_memory_is_retried_too():
    rig = Rig()
    request = rig.submit("a", range(8), max_tokens=1)
    launch, errors = rig.device.launch, [StepOutOfMemoryError("at launch")]

    def fails_once(batch):
        if errors:
            raise errors.pop()
        launch(batch)

    rig.device.launch = fails_once
    rig.turns(1)
    assert rig.scheduler.budget.tokens == 4
    rig.turns(2)
    assert end_of(request) == "length"
    assert request.output_token_ids == rig.device.reference(range(8), 1)


@pytest.mark.parametrize("call", ["launch", "collect"])
def test_a_call_of_the_device_hangs_once_it_took_the_timeout(call):
    rig = Rig()
    request = rig.submit("a")
    cause = RuntimeError("hung")
    verdicts = []
    answer = getattr(rig.device, call)

    def hangs(*args):
        for passed in (0.0, 4.999, 5.0, 6.0):
            rig.now = 100.0 + passed
            verdicts.append(rig.core.fail_if_hung(5.0, cause))
        return answer(*args)

    setattr(rig.device, call, hangs)
    assert rig.core.fail_if_hung(0.0, cause) is False
    rig.core.run()
    # The second to find out is not the one that did.
    assert verdicts == [False, False, True, False]
    assert rig.core.is_hung
    assert rig.core.fatal_error is cause
    assert isinstance(end_of(request), EngineDeadError)
    assert isinstance(rig.core.call(int).exception(0), EngineDeadError)
    # The thread came back, and took nothing of it in.
    assert request.num_output_tokens == 0
    assert rig.device.closed


def test_a_device_that_is_not_called_does_not_hang():
    rig = Rig()
    rig.submit("a", max_tokens=1)
    rig.turns(1)
    rig.now += 1000.0
    assert rig.core.fail_if_hung(5.0, RuntimeError("hung")) is False
    assert rig.core.fatal_error is None


def raised(kind, seen):
    """An exception whose frame refers to something."""
    kept = FakeTokenizer()
    seen.append(weakref.ref(kept))
    try:
        raise kind
    except kind as error:
        return error


def test_traceback_frames_of_an_error_chain_are_cleared():
    seen = []
    error, cause, context, first = (
        raised(kind, seen) for kind in (KeyError, ValueError, OSError, TypeError)
    )
    error.__cause__, error.__context__, context.__context__ = cause, context, first
    first.__context__ = error  # a ring
    assert all(ref() is not None for ref in seen)
    clear_frames(error)
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4
    assert first.__traceback__.tb_frame.f_code.co_name == "raised"


def test_replaced_tracebacks_keep_no_caller_alive():
    seen = []

    def catch():
        kept = FakeTokenizer()
        seen.append(weakref.ref(kept))
        return [raised(kind, seen) for kind in (KeyError, ValueError, OSError)]

    error, cause, context = catch()
    error.__cause__, error.__context__, context.__context__ = cause, context, error
    error.__traceback__ = raised(IndexError, seen).__traceback__
    replace_tracebacks_by_note(error)
    assert [ref() for ref in seen] == [None] * 5
    (note,) = error.__notes__
    for name in ("KeyError", "ValueError", "OSError"):
        assert f"{name} was raised in:\n" in note
    assert note.count(", in raised\n") == 3
    assert "raise kind" in note
    replace_tracebacks_by_note(error)
    try:
        raise error
    except KeyError as again:
        replace_tracebacks_by_note(again)
    assert error.__notes__[0] == note
    assert len(error.__notes__) == 2


def test_an_exception_that_is_raised_again_and_again_keeps_one_note():
    error = KeyError("shared")
    for _ in range(3):
        try:
            raise error
        except KeyError:
            replace_tracebacks_by_note(error)
    assert len(error.__notes__) == 1


class RaisingNotes(RequestError):
    @property
    def __notes__(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        raise KeyboardInterrupt

    def add_note(self, note):
        raise SystemExit


class EndlessNotes(RequestError):
    __notes__ = itertools.count()  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize("odd", [RaisingNotes, EndlessNotes])
def test_odd_notes_do_not_end_the_engine(odd):
    with pytest.raises(odd) as caught:
        raise odd("x")
    replace_tracebacks_by_note(caught.value)
    assert caught.value.__traceback__ is None
