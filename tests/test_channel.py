"""Channel: order, ends and wakes under every thread switch."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.core.channel import Channel, StreamEnd, merge_unread_tokens
from asyncllm.core.output_processor import OutputProcessor
from asyncllm.errors import EngineError
from asyncllm.outputs import Delta, Usage
from asyncllm.runtime.mailbox import ThreadMailbox
from tests.channels import ChannelRig, logprobs_of, run_with_switch
from tests.hypothesis_settings import examples
from tests.slow import slow_but


def at_each_bytecode(make):
    """Yields rigs made by ``make() -> (rig, call, other)``, each after ``call`` with ``other``
    in its middle, one bytecode later than the rig before."""
    for at in itertools.count():
        rig, call, other = make()
        reached = run_with_switch(call, at, other)
        if not reached:
            assert at > 5, "nothing was traced"
            rig.close()
            return
        yield rig
        rig.close()


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("on_slow", ["coalesce", "pause"])
@pytest.mark.parametrize("num_unread", range(6))
def test_read_in_the_middle_of_a_put(num_unread, on_slow, logprobs):
    def make():
        rig = ChannelRig(max_unread=3, on_slow=on_slow, logprobs=logprobs)
        for _ in range(num_unread):
            rig.put()
        return rig, rig.put, rig.read

    for rig in at_each_bytecode(make):
        rig.put()
        rig.put()
        rig.put_last()
        rig.output_processor.flush_wakeups()
        rig.read_until_asleep()
        assert rig.end == "length"
        rig.check_read(num_unread + 4)


@pytest.mark.parametrize("on_slow", ["coalesce", "pause"])
@pytest.mark.parametrize("ending", [False, True])
@pytest.mark.parametrize("num_unread", range(4))
def test_put_in_the_middle_of_a_read(num_unread, ending, on_slow):
    """The reader that finds nothing goes to sleep, and is woken by what it did not see."""

    def make():
        rig = ChannelRig(max_unread=3, on_slow=on_slow)
        for _ in range(num_unread):
            rig.put()
        return rig, rig.read, rig.put_last if ending else rig.put

    for rig in at_each_bytecode(make):
        rig.output_processor.flush_wakeups()
        rig.read_until_asleep()
        assert rig.end == ("length" if ending else None)
        rig.check_read(num_unread + 1)


@pytest.mark.parametrize("wake", ["before the next put", "after the next put"])
def test_read_in_the_middle_of_a_put_that_wakes(wake):
    """A reader that finds the token by itself and waits again is woken by the next one, also
    if the flag of this second wait was cleared for the first."""

    def make():
        rig = ChannelRig(max_unread=3)
        rig.read()
        assert rig.asleep

        def found_without_a_wake():
            rig.channel.waiter.woken = True
            rig.read_until_asleep()

        return rig, rig.put, found_without_a_wake

    for rig in at_each_bytecode(make):
        rig.output_processor.flush_wakeups()
        if wake == "before the next put":
            rig.read_until_asleep()
        rig.put()
        rig.output_processor.flush_wakeups()
        rig.read_until_asleep()
        rig.check_read(2)


def test_queued_once_for_each_wake():
    rig = ChannelRig(max_unread=100)
    for num_wakes in range(1, 4):
        rig.read_until_asleep()
        for _ in range(10):
            rig.put()
            rig.output_processor.flush_wakeups()
        assert list(rig.mailbox._channels_to_wake) == [rig.channel]
        assert len(rig.channel.items) == len(rig.host.posted) == 1
        rig.read_until_asleep()
        assert len(rig.deltas) == num_wakes
    rig.check_read(30)
    rig.close()


def test_token_after_the_end_is_dropped():
    for max_unread in (1, 4):
        rig = ChannelRig(max_unread=max_unread)
        rig.put()
        rig.abort()
        late = rig.channel
        late.put(5, "5 ", None)
        late.put_last_delta(Delta("6 ", (6,)))
        assert (late.num_written, late.num_unread, len(late.items)) == (1, 1, 1)
        rig.read()
        assert [delta.token_ids for delta in rig.deltas] == [(1000,)]
        assert rig.end == "abort"
        rig.close()


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("max_unread", range(1, 5))
def test_unread_tokens_merge_up_to_the_delta_limit(max_unread, logprobs):
    channel = Channel(max_unread=max_unread)
    assert (channel.num_written, channel.num_read, channel.num_unread) == (0, 0, 0)
    assert (channel.has_reader, channel.is_backpressured, channel.ended) == (False, False, False)
    for token_id in range(9):
        channel.put(token_id, f"{token_id} ", logprobs_of(token_id) if logprobs else None)
        full, rest = divmod(token_id + 1, max_unread)
        sizes = [
            len(item.token_ids) if isinstance(item, Delta) else item[0] for item in channel.items
        ]
        assert sizes == [max_unread] * full + [rest] * (rest > 0)
    assert channel.num_unread == 9
    deltas = [
        item if isinstance(item, Delta) else merge_unread_tokens(item) for item in channel.items
    ]
    assert [token for delta in deltas for token in delta.token_ids] == list(range(9))
    assert [delta.text for delta in deltas] == [
        "".join(f"{token_id} " for token_id in delta.token_ids) for delta in deltas
    ]
    assert [delta.logprobs for delta in deltas] == [
        tuple(map(logprobs_of, delta.token_ids)) if logprobs else None for delta in deltas
    ]


def test_paused_channel_reader_gets_single_tokens():
    channel = Channel(max_unread=3, on_slow="pause")
    assert (channel.max_unread, channel.max_merged, channel.on_slow) == (3, 1, "pause")
    assert (Channel().max_unread, Channel().max_merged) == (256, 256)
    for token_id in range(5):
        channel.put(token_id, "", None)
    assert [item.token_ids for item in channel.items] == [(i,) for i in range(5)]
    assert [item.logprobs for item in channel.items] == [None] * 5


def test_last_delta_of_a_member_stays_by_itself():
    channel = Channel()
    channel.put(3, "3 ", None)
    channel.put_last_delta(Delta("4 ", (4,), finish_reason="stop"))
    channel.put_last_delta(Delta("held", (), finish_reason="abort"))
    channel.put(5, "5 ", None)
    channel.put(6, "6 ", None)
    assert channel.num_written == 4
    items = [
        item if isinstance(item, Delta) else merge_unread_tokens(item) for item in channel.items
    ]
    assert [item.text for item in items] == ["3 ", "4 ", "held", "5 6 "]


def test_first_end_is_the_end_and_counts_its_token_once():
    channel = Channel()
    channel.put(3, "3 ", None)
    channel.put(4, "4 ", None)
    usage = Usage(1, 1, 0, 0.0, None, 0.0)
    first = StreamEnd("stop", None, usage, last_delta=Delta("5 ", (5,)))
    assert channel.propose_end(first) is True
    assert (channel.ended, channel.num_written) == (False, 3)
    assert (
        channel.propose_end(StreamEnd("stop", None, usage, last_delta=Delta("6 ", (6,)))) is False
    )
    channel.end()
    assert channel.stream_end is first
    assert (channel.ended, channel.num_written) == (True, 3)
    for end in (StreamEnd("abort", None, usage), RuntimeError("failed")):
        channel = Channel()
        assert channel.propose_end(end) is True
        channel.end()
        assert (channel.stream_end, channel.num_written) == (end, 0)


def ended_once(rig):
    """The reader slept all the while, and only those who ended the request wake it."""
    rig.read_until_asleep()
    assert rig.end is not None
    assert list(map(repr, rig.observed.seen)) == [repr(rig.end)]
    delivery = rig.output_processor
    assert delivery.num_finished + delivery.num_aborted + delivery.num_failed == 1
    assert delivery.num_failed == isinstance(rig.end, RuntimeError)
    assert set(rig.forgotten) == {rig.group}
    rig.read()
    with pytest.raises(StopAsyncIteration):
        rig.stream.__anext__().send(None)


@pytest.mark.parametrize("num_unread", slow_but([0, 1, 2, 5], 0, 5))
@pytest.mark.parametrize("late", ["put", "put_last", "abort", "announce_and_read"])
@pytest.mark.parametrize("watcher_first", [False, True])
def test_engine_declared_hung_while_its_thread_comes_back(watcher_first, late, num_unread):
    def make():
        rig = ChannelRig(max_unread=3)
        rig.read()
        # Another stream has a wake to be announced, with no reader in here.
        rig.output_processor._channels_to_wake.append(Channel())
        for _ in range(num_unread):
            rig.put()
        call, other = getattr(rig, late), rig.fail
        return (rig, other, call) if watcher_first else (rig, call, other)

    for rig in at_each_bytecode(make):
        # The late thread ends without another announcement.
        ended_once(rig)
        num_read = sum(len(delta.token_ids) for delta in rig.deltas)
        assert num_unread <= num_read <= len(rig.tokens)
        rig.check_read(num_read)


def test_stream_ends_while_thread_is_stuck_in_observer():
    rig = ChannelRig()
    told, go_on = threading.Event(), threading.Event()
    on_finish = rig.observed.on_finish

    def stuck(*how):
        on_finish(*how)
        told.set()
        assert go_on.wait(10)

    rig.observed.on_finish = stuck
    rig.read()
    engine_thread = threading.Thread(target=rig.put_last)
    engine_thread.start()
    assert told.wait(10)
    rig.fail()
    rig.read_until_asleep()
    assert rig.end == "length"
    rig.check_read(1)
    go_on.set()
    engine_thread.join()
    ended_once(rig)


def test_cancelled_read_loses_no_tokens():
    rig = ChannelRig(max_unread=3)
    rig.request.output.detokenizer.finish = lambda: "held back"
    rig.read()
    rig.put()
    rig.cancel()
    assert rig.aborted
    for _ in range(4):
        rig.put()
    rig.abort()
    rig.read_until_asleep()
    assert "a read of its stream was cancelled" in str(rig.end)
    rig.deltas[-1] = replace(rig.deltas[-1], text=rig.deltas[-1].text.removesuffix("held back"))
    rig.check_read(5)
    assert rig.stream._outputs[0].texts[-1].endswith("held back")


class ChannelMachine(RuleBasedStateMachine):
    """Puts, ends, wakes and reads in any order, against a list of what is unread."""

    @initialize(
        on_slow=st.sampled_from(["coalesce", "pause", "abort"]),
        max_unread=st.integers(1, 5),
        logprobs=st.booleans(),
    )
    def start(self, on_slow, max_unread, logprobs):
        self.rig = ChannelRig(max_unread=max_unread, on_slow=on_slow, logprobs=logprobs)
        self.how = None
        self.num_ended = None

    @property
    def runs(self):
        return self.how is None and not self.rig.channel.is_backpressured

    @precondition(lambda self: self.runs)
    @rule()
    def put(self):
        self.rig.put()
        if self.rig.request.is_finished:
            assert self.rig.channel.on_slow == "abort"
            assert self.rig.channel.num_unread == self.rig.channel.max_unread
            self.end_with("abort")

    @precondition(lambda self: self.how is None)
    @rule(how=st.sampled_from(["length", "abort", "hung"]))
    def end(self, how):
        if how == "length" and self.runs:
            self.rig.put_last()
        elif how == "hung":
            self.rig.fail()
        else:
            how = "abort"
            self.rig.abort()
        self.end_with(how)

    @precondition(lambda self: self.how is not None)
    @rule(again=st.sampled_from(["put", "put_last", "abort", "fail"]))
    def late(self, again):
        getattr(self.rig, again)()

    @rule()
    def flush_wakeups(self):
        self.rig.output_processor.flush_wakeups()

    @rule()
    def run_loop(self):
        self.rig.host.run_posted()

    @rule()
    def read(self):
        self.rig.read()

    def end_with(self, how):
        self.how = how
        self.num_ended = len(self.rig.tokens)

    @invariant()
    def agrees(self):
        rig, channel = self.rig, self.rig.channel
        num_read = sum(len(delta.token_ids) for delta in rig.deltas)
        rig.check_read(num_read)
        num_written = len(rig.tokens) if self.how is None else self.num_ended
        assert channel.num_unread == num_written - num_read
        assert len(channel.items) <= -(-channel.num_unread // channel.max_merged)
        if self.how is None:
            assert channel.on_slow == "coalesce" or channel.num_unread <= channel.max_unread
            assert not channel.is_backpressured or channel.num_unread > channel.max_unread // 2
            assert len(rig.mailbox._channels_to_wake) <= 1
        assert len(rig.host.posted) <= 1

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        if self.how is None:
            self.end("length")
        rig.output_processor.flush_wakeups()
        rig.read_until_asleep()
        assert str(rig.end) == self.how
        rig.check_read(self.num_ended)
        assert list(map(repr, rig.observed.seen)) == [repr(rig.end)]


ChannelMachine.TestCase.settings = examples(100, stateful_step_count=40)
test_any_order_of_operations = ChannelMachine.TestCase


@pytest.fixture
def short_switch_interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def read_all(rig):
    """Reads on this thread, as LLM does, to the end."""
    mailbox = ThreadMailbox(10.0, lambda: pytest.fail("a wake was lost"))
    with contextlib.suppress(RuntimeError):
        while (delta := rig.stream.read_blocking(mailbox)) is not None:
            rig.deltas.append(delta)
    rig.end = rig.stream.finish_reason or rig.stream._error


@pytest.mark.parametrize("max_unread", [1, 2, 7])
def test_threads_at_a_short_switch_interval(short_switch_interval, max_unread):
    rig = ChannelRig(max_unread=max_unread)
    reader = threading.Thread(target=read_all, args=(rig,))
    reader.start()
    for _ in range(3000):
        rig.put()
        rig.output_processor.flush_wakeups()
    rig.put_last()
    rig.output_processor.flush_wakeups()
    reader.join(20)
    assert rig.end == "length"
    rig.check_read(3001)


def test_threads_that_end_a_channel_together(short_switch_interval):
    for _ in range(150):
        rig = ChannelRig(max_unread=3)
        barrier = threading.Barrier(4)

        def engine(rig=rig, barrier=barrier):
            barrier.wait()
            for _ in range(5):
                rig.put()
            rig.put_last()
            rig.output_processor.flush_wakeups()

        def watcher(rig=rig, barrier=barrier):
            barrier.wait()
            rig.fail()

        def reader(rig=rig, barrier=barrier):
            barrier.wait()
            read_all(rig)

        threads = [threading.Thread(target=one) for one in (engine, watcher, watcher, reader)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert rig.end is not None
        assert list(map(repr, rig.observed.seen)) == [repr(rig.end)]
        delivery = rig.output_processor
        assert delivery.num_finished + delivery.num_failed == 1
        rig.check_read(sum(len(delta.token_ids) for delta in rig.deltas))


def test_python_without_the_gil_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(EngineError, match="PYTHON_GIL=1"):
        ChannelRig()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert isinstance(ChannelRig().output_processor, OutputProcessor)
    assert not Channel().ended
