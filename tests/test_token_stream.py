"""TokenStream by hand: reads, waits and readers."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from asyncllm.core.channel import Channel, StreamEnd
from asyncllm.core.output_processor import DetokenizerState
from asyncllm.core.request import Request, RequestGroup
from asyncllm.errors import RequestError
from asyncllm.outputs import CompletionOutput, Delta, Usage
from asyncllm.runtime.mailbox import LoopMailbox, ThreadMailbox
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from tests.channels import Host, Waiter, logprobs_of
from tests.refusals import refused

USAGE = Usage(2, 3, 0, 0.5, 1.0, 2.0)


class Loop(Host):
    """A loop that other threads than the test's cannot read on."""

    foreign = False

    def __init__(self):
        super().__init__()
        self.waits: list[float] = []

    def make_waiter(self):
        return None if self.foreign else Waiter()

    async def wait_at_most(self, waiter, seconds):
        self.waits.append(seconds)
        await waiter


class Rig:
    def __init__(self, *, max_unread=4, on_slow="coalesce", logprobs=None):
        self.channel = Channel(max_unread=max_unread, on_slow=on_slow)
        self.group = RequestGroup("r", self.channel)
        self.request = Request(
            self.group,
            SamplingParams(logprobs=logprobs),
            token_ids=[1, 2],
            max_model_len=100,
            output=DetokenizerState(str),
        )
        self.aborts = 0
        self.abandoned: list[RequestGroup] = []
        self.sent: list[tuple] = []
        core = SimpleNamespace(
            abort=self.abort,
            abandon=self.abandoned.append,
            send=lambda *command: self.sent.append(command),
            on_reader_caught_up="on_reader_caught_up",
            check_not_engine_thread=lambda: None,
        )
        self.loop = Loop()
        self.mailbox = LoopMailbox(self.loop)
        self.stream = TokenStream(self.request, core, lambda: self.mailbox)

    def abort(self, group):
        assert group is self.group
        group.cancelled = True
        self.aborts += 1

    def put(self, *token_ids):
        for token_id in token_ids:
            self.request.token_ids.append(token_id)
            logprobs = logprobs_of(token_id) if self.request.sampling.logprobs is not None else None
            self.channel.put(token_id, f"{token_id} ", logprobs)

    def end(self, reason="length", last=None, text="", stop_reason=None):
        if last is not None:
            self.request.token_ids += last.token_ids
        self.channel.propose_end(StreamEnd(reason, stop_reason, USAGE, text, last))
        self.channel.end()

    def fail(self, error):
        self.channel.propose_end(error)
        self.channel.end()

    def read(self, *args):
        """One read that finds something at once."""
        reading = self.stream.__anext__(*args)
        with pytest.raises(StopIteration) as stop:
            reading.send(None)
        return stop.value.value

    def wait(self, *args):
        """A read that finds nothing and waits."""
        reading = self.stream.__anext__(*args)
        assert reading.send(None) is None
        return reading

    def check_idle(self):
        assert (self.channel.has_reader, self.channel.waiter) == (False, None)


def resumed(reading):
    with pytest.raises(StopIteration) as stop:
        reading.send(None)
    return stop.value.value


# --- what a read takes ------------------------------------------------------------------


def test_a_stream_that_keeps_no_output_frees_what_was_read():
    rig = Rig(logprobs=0)
    rig.stream._keeps_output = False
    rig.put(5, 6)
    assert rig.read() == Delta("5 6 ", (5, 6), logprobs=(logprobs_of(5), logprobs_of(6)))
    rig.end()
    assert rig.read().finish_reason == "length"
    assert (rig.stream.finish_reason, rig.stream.usage) == ("length", USAGE)
    (reader,) = rig.stream._outputs
    assert (reader.texts, reader.logprobs, rig.channel.num_read) == ([], [], 2)


def test_read_merges_unread_tokens_and_last_has_the_end():
    rig = Rig(logprobs=0)
    rig.put(5, 6)
    assert rig.read() == Delta("5 6 ", (5, 6), logprobs=(logprobs_of(5), logprobs_of(6)))
    assert (rig.stream.finish_reason, rig.stream.usage) == (None, None)
    rig.put(7)
    last = Delta("8 ", (8,), logprobs=(logprobs_of(8),))
    rig.end("stop", last, "held", stop_reason="X")
    assert rig.read() == Delta(
        "7 8 held",
        (7, 8),
        logprobs=(logprobs_of(7), logprobs_of(8)),
        finish_reason="stop",
        stop_reason="X",
        usage=USAGE,
    )
    assert (rig.stream.finish_reason, rig.stream.usage) == ("stop", USAGE)
    with pytest.raises(StopAsyncIteration):
        rig.stream.__anext__().send(None)
    completion = rig.stream.completion()
    assert completion.outputs == (
        CompletionOutput(
            index=0,
            text="5 6 7 8 held",
            token_ids=(5, 6, 7, 8),
            finish_reason="stop",
            stop_reason="X",
            logprobs=tuple(map(logprobs_of, (5, 6, 7, 8))),
        ),
    )
    assert (completion.request_id, completion.prompt_token_ids) == ("r", (1, 2))
    assert completion.usage is USAGE
    rig.check_idle()


@pytest.mark.parametrize("unread", range(1, 9))
def test_end_comes_with_its_token_unless_excess(unread):
    rig = Rig(max_unread=4)
    rig.put(*range(10, 10 + unread))
    rig.end(last=Delta("9 ", (9,)))
    deltas = []
    while rig.stream.finish_reason is None:
        deltas.append(rig.read())
    assert [len(delta.token_ids) for delta in deltas] == {
        1: [2], 2: [3], 3: [4], 4: [4, 1], 5: [4, 2], 6: [4, 3], 7: [4, 4], 8: [4, 4, 1]
    }[unread]  # fmt: skip
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert [delta.usage for delta in deltas] == [None] * (len(deltas) - 1) + [USAGE]
    assert all(delta.logprobs is None for delta in deltas)
    assert rig.stream.completion().outputs[0].token_ids == (*range(10, 10 + unread), 9)
    assert rig.channel.num_unread == 0


def test_tokenless_end_merges_into_unread_delta_or_stands_alone():
    for unread, text in ((1, "5 held"), (0, "held")):
        rig = Rig()
        rig.put(*[5] * unread)
        rig.end("abort", text="held")
        delta = rig.read()
        assert (delta.text, delta.token_ids, delta.finish_reason) == (text, (5,) * unread, "abort")
        assert rig.stream.completion().outputs[0].logprobs is None


def test_exception_comes_after_unread_deltas_and_repeats():
    rig = Rig()
    rig.put(5)
    error = RequestError("failed")
    rig.fail(error)
    assert rig.read() == Delta("5 ", (5,))
    with pytest.raises(RequestError) as caught:
        rig.stream.__anext__().send(None)
    assert (type(caught.value), str(caught.value)) == (type(error), str(error))
    with pytest.raises(StopAsyncIteration):
        rig.stream.__anext__().send(None)
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            rig.stream.completion()
        assert (type(caught.value), str(caught.value)) == (type(error), str(error))
    assert repr(rig.stream) == "<TokenStream 'r' closed>"


@pytest.mark.parametrize(("max_unread", "resumes_at"), [(4, 2), (5, 2), (2, 1), (1, 0)])
def test_a_paused_request_goes_on_when_half_of_it_is_read(max_unread, resumes_at):
    rig = Rig(max_unread=max_unread, on_slow="pause")
    rig.put(*range(max_unread))
    rig.channel.is_backpressured = True
    for unread in range(max_unread - 1, -1, -1):
        rig.read()
        assert rig.channel.num_unread == unread
        assert len(rig.sent) == max(0, resumes_at - unread + 1)
    assert set(rig.sent) == {("on_reader_caught_up", rig.group)}


def test_a_request_that_is_not_paused_is_not_resumed():
    rig = Rig(on_slow="pause")
    rig.put(1, 2)
    rig.read()
    rig.read()
    assert rig.sent == []


# --- what a read waits for --------------------------------------------------------------


def test_a_read_waits_until_it_is_woken_with_something_there():
    rig = Rig()
    reading = rig.wait()
    assert rig.channel.mailbox is rig.mailbox
    assert (rig.channel.has_reader, type(rig.channel.waiter)) == (True, Waiter)
    # Woken for nothing, it waits anew.
    first, rig.channel.has_reader = rig.channel.waiter, False
    assert reading.send(None) is None
    assert rig.channel.has_reader is True
    assert rig.channel.waiter is not first
    rig.put(5)
    assert resumed(reading) == Delta("5 ", (5,))
    rig.check_idle()
    reading = rig.wait()
    rig.end()
    assert resumed(reading).finish_reason == "length"
    rig.check_idle()


def test_item_between_check_and_flag_is_read_at_once():
    for ending in (False, True):
        rig = Rig()
        make_waiter = rig.loop.make_waiter

        def meanwhile(rig=rig, make_waiter=make_waiter, ending=ending):
            rig.end() if ending else rig.put(5)
            return make_waiter()

        rig.loop.make_waiter = meanwhile
        assert rig.read().token_ids == (() if ending else (5,))
        rig.check_idle()


def test_heartbeat_is_none_and_reads_continue():
    rig = Rig()
    stream = rig.stream.with_heartbeat(3)
    assert stream.__aiter__() is stream
    for _ in range(2):
        reading = stream.__anext__()
        assert reading.send(None) is None
        assert resumed(reading) is None
        rig.check_idle()
    assert rig.loop.waits == [3.0, 3.0]
    reading = stream.__anext__()
    reading.send(None)
    rig.put(5)
    assert resumed(reading) == Delta("5 ", (5,))
    rig.put(6)
    with pytest.raises(StopIteration) as stop:
        stream.__anext__().send(None)
    assert stop.value.value == Delta("6 ", (6,))
    assert rig.loop.waits == [3.0] * 3
    assert rig.aborts == 0
    for seconds in (0, -1.0, float("inf"), "3"):
        with refused("seconds"):
            rig.stream.with_heartbeat(seconds)


@pytest.mark.parametrize("within", [None, 3.0])
def test_a_read_that_is_cancelled_aborts_and_says_so(within):
    rig = Rig()
    rig.put(4)
    rig.read()
    reading = rig.wait(within)
    with pytest.raises(KeyboardInterrupt):
        reading.throw(KeyboardInterrupt())
    assert rig.aborts == 1
    rig.check_idle()
    rig.put(5)
    rig.end("abort", text="held")
    assert rig.read() == Delta("5 held", (5,))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"with_heartbeat\(seconds\).*asyncio\.wait"):
            rig.stream.completion()
    with pytest.raises(RequestError, match="'r' was aborted because a read of its stream"):
        rig.stream.__anext__().send(None)
    with pytest.raises(StopAsyncIteration):
        rig.stream.__anext__().send(None)
    assert rig.stream.finish_reason is None


def test_cancelled_read_of_ended_request_is_its_end():
    rig = Rig()
    reading = rig.wait()
    with pytest.raises(KeyboardInterrupt):
        reading.throw(KeyboardInterrupt())
    rig.end("length")
    assert rig.read().finish_reason == "length"


def test_a_cancelled_read_of_an_aborted_request_is_an_abort():
    rig = Rig()
    reading = rig.wait()
    rig.stream.abort()
    with pytest.raises(KeyboardInterrupt):
        reading.throw(KeyboardInterrupt())
    assert rig.aborts == 1
    rig.end("abort")
    assert rig.read().finish_reason == "abort"


# --- who may read -----------------------------------------------------------------------


def test_one_task_reads_at_a_time():
    rig = Rig()
    reading = rig.wait()
    with pytest.raises(RuntimeError, match="'r' is being read by another task"):
        rig.stream.__anext__().send(None)
    with pytest.raises(RuntimeError, match="'r' is being read by another thread"):
        rig.stream.read_blocking(ThreadMailbox(1.0, lambda: None))
    rig.put(5)
    assert resumed(reading).token_ids == (5,)
    rig.put(6)
    assert rig.read().token_ids == (6,)


def test_stream_belongs_to_its_first_loop():
    rig = Rig()
    reading = rig.wait()
    rig.put(5)
    resumed(reading)
    rig.loop.foreign = True
    with pytest.raises(RuntimeError, match="'r' belongs to the event loop that read it first"):
        rig.stream.__anext__().send(None)
    rig.check_idle()
    assert rig.aborts == 0
    # What is there needs no loop.
    rig.put(6)
    assert rig.read().token_ids == (6,)
    with pytest.raises(RuntimeError, match="'r' belongs to an event loop"):
        rig.stream.read_blocking(ThreadMailbox(1.0, lambda: None))


def test_a_thread_reads_by_blocking_and_a_loop_then_cannot():
    rig = Rig()
    woken = threading.Event()
    mailbox = ThreadMailbox(0.001, woken.set)
    rig.put(5)
    assert rig.stream.read_blocking(mailbox) == Delta("5 ", (5,))
    assert rig.channel.mailbox is mailbox
    with pytest.raises(RuntimeError, match="'r' belongs to the event loop"):
        rig.stream.__anext__().send(None)
    read = []
    thread = threading.Thread(target=lambda: read.append(rig.stream.read_blocking(mailbox)))
    thread.start()
    # It looks after the step while it waits.
    assert woken.wait(10)
    assert rig.channel.has_reader
    with pytest.raises(RuntimeError, match="another thread"):
        rig.stream.read_blocking(mailbox)
    rig.put(6)
    mailbox.notify([rig.channel])
    thread.join(10)
    assert read == [Delta("6 ", (6,))]
    rig.check_idle()
    rig.end()
    assert rig.stream.read_blocking(mailbox).finish_reason == "length"
    assert rig.stream.read_blocking(mailbox) is None
    assert rig.aborts == 0


def test_a_thread_that_is_interrupted_aborts():
    rig = Rig()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.stream.read_blocking(ThreadMailbox(0.001, interrupted))
    assert rig.aborts == 1
    rig.check_idle()
    rig.put(5)
    assert rig.stream.read_blocking(ThreadMailbox(1.0, lambda: None)).token_ids == (5,)


# --- ways out ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["close", "aclose", "with"])
def test_closing_aborts_and_ends_the_iteration(way):
    rig = Rig()
    rig.put(5)
    assert repr(rig.stream) == "<TokenStream 'r' open>"
    if way == "close":
        rig.stream.close()
    elif way == "aclose":
        with pytest.raises(StopIteration):
            rig.stream.aclose().send(None)
    else:
        with pytest.raises(StopIteration) as stop:
            rig.stream.__aenter__().send(None)
        assert stop.value.value is rig.stream
        with pytest.raises(StopIteration):
            rig.stream.__aexit__(None, None, None).send(None)
    assert rig.aborts == 1
    with pytest.raises(StopAsyncIteration):
        rig.stream.__anext__().send(None)
    assert rig.stream.read_blocking(ThreadMailbox(1.0, lambda: None)) is None
    assert repr(rig.stream) == "<TokenStream 'r' closed>"


def test_forgotten_stream_is_abandoned_once():
    rig = Rig()
    group = rig.group
    del rig.stream
    assert rig.abandoned == [group]
    rig = Rig()
    rig.stream.abort()
    del rig.stream
    assert rig.abandoned == []


def test_failed_stream_has_nothing_to_abandon():
    del_of = TokenStream.__new__(TokenStream).__del__
    assert del_of() is None
