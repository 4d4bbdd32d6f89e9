"""OutputProcessor: tokens, wakes and ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asyncllm.core.channel import Channel, StreamEnd
from asyncllm.core.output_processor import (
    DetokenizerState,
    OutputProcessor,
    make_partial_completion,
    make_usage,
)
from asyncllm.core.parser_memory import ParserMemory
from asyncllm.core.request import Request, RequestGroup, Status
from asyncllm.errors import RequestError
from asyncllm.outputs import Delta
from asyncllm.sampling_params import SamplingParams
from tests.channels import logprobs_of


class Text:
    """A detokenizer: token 5 is "5 ", and 99 is held back until the end. Token 66 completes a
    stop string, 13 has no text."""

    def __init__(self):
        self.stopped = None
        self.held = ""

    def push(self, token_id):
        if token_id == 13:
            raise KeyboardInterrupt("no text")
        if token_id == 66:
            self.stopped = "STOP"
            return "before"
        if token_id == 99:
            self.held += "99 "
            return ""
        return f"{token_id} "

    def finish(self):
        if self.held == "99 99 ":
            raise KeyboardInterrupt("no text")
        return self.held


class Mailbox:
    def __init__(self, closed=False):
        self.closed = closed
        self.notified: list[list[Channel]] = []

    def notify(self, channels):
        self.notified.append(list(channels))
        return not self.closed

    def is_closed(self):
        return self.closed


class Notifier:
    def __init__(self):
        self.told: list[object] = []

    def notify_first_token(self):
        self.told.append("first")

    def notify_finish(self, usage, error):
        self.told.append((usage.total_time, error))


class Rig:
    """An output processor, and a scheduler that notes what it is asked for."""

    def __init__(self):
        self.now = 10.0
        self.calls: list[tuple] = []
        self.left: list[Request] = []
        self.forgotten: list[RequestGroup] = []
        self.groups: list[RequestGroup] = []
        scheduler = SimpleNamespace(
            finish=self.finish,
            pause=lambda request: self.calls.append(("pause", request)),
            resume=lambda request: self.calls.append(("resume", request)),
            requests=lambda: [m for group in self.groups for m in group.unfinished_requests],
        )
        admission = SimpleNamespace(
            mark_members_ended=self.left.extend, forget_group=self.forgotten.append
        )
        self.processor = OutputProcessor(scheduler, admission, lambda: self.now, ParserMemory())

    def finish(self, request, reason):
        if not request.is_finished:
            request.status, request.finish_reason = Status.FINISHED, reason

    def group(self, size=1, *, name="g", max_unread=256, on_slow="coalesce", **params):
        group = RequestGroup(name, Channel(max_unread=max_unread, on_slow=on_slow), arrived_at=4.0)
        group.notifier = self.notifier = Notifier()
        for _ in range(size):
            request = Request(
                group,
                SamplingParams(**params),
                token_ids=[1, 2],
                max_model_len=100,
                output=DetokenizerState(
                    lambda token_ids: "".join(f"{t}," for t in token_ids), Text()
                ),
            )
            request.status = Status.RUNNING
        self.groups.append(group)
        return group

    def deliver(self, request, token_id, reason=None, logprobs=None):
        request.token_ids.append(token_id)
        if reason is not None:
            self.finish(request, reason)
        self.processor.deliver((request, token_id, logprobs, None), self.now)

    @property
    def counts(self):
        processor = self.processor
        return processor.num_finished, processor.num_aborted, processor.num_failed


def end_of(group):
    final = group.channel.stream_end
    return (
        (final.finish_reason, final.stop_reason, final.text)
        if isinstance(final, StreamEnd)
        else final
    )


# --- tokens -----------------------------------------------------------------------------


def test_a_token_is_a_delta_and_the_first_is_told():
    rig = Rig()
    group = rig.group(max_unread=1)
    (request,) = group.members
    rig.deliver(request, 5, logprobs=logprobs_of(5))
    rig.now = 12.0
    rig.deliver(request, 6)
    assert list(group.channel.items) == [
        Delta("5 ", (5,), logprobs=(logprobs_of(5),)),
        Delta("6 ", (6,)),
    ]
    assert request.first_token_at == 10.0
    assert rig.notifier.told == ["first"]
    assert (end_of(group), rig.counts) == (None, (0, 0, 0))


@pytest.mark.parametrize(
    ("reason", "token_id", "include", "last", "held"),
    [
        ("length", 5, False, "5 ", ""),
        ("length", 99, False, "99 ", ""),
        ("stop", 5, False, "", ""),
        ("stop", 5, True, "5 ", ""),
    ],
)
def test_the_last_token_comes_with_the_end(reason, token_id, include, last, held):
    rig = Rig()
    group = rig.group(include_stop_str_in_output=include)
    (request,) = group.members
    rig.deliver(request, 4)
    request.stop_reason = 7
    rig.now = 12.5
    rig.deliver(request, token_id, reason, logprobs_of(token_id))
    final = group.channel.stream_end
    assert end_of(group) == (reason, 7, held)
    assert final.last_delta == Delta(last, (token_id,), logprobs=(logprobs_of(token_id),))
    assert len(group.channel.items) == 1
    assert final.usage.total_time == 8.5
    assert final.usage.completion_tokens == 2
    assert (rig.counts, rig.forgotten, group.cancelled) == ((1, 0, 0), [group], True)
    assert rig.notifier.told == ["first", (8.5, None)]


@pytest.mark.parametrize("reason", [None, "length", "stop"])
def test_stop_string_inside_a_token_ends_request(reason):
    rig = Rig()
    group = rig.group(include_stop_str_in_output=True)
    (request,) = group.members
    rig.deliver(request, 66, reason)
    assert end_of(group) == ("stop", "STOP", "")
    assert group.channel.stream_end.last_delta == Delta("before", (66,))
    assert (request.status, request.finish_reason) == (Status.FINISHED, "stop")


def test_early_member_end_has_its_own_delta():
    rig = Rig()
    group = rig.group(2)
    first, second = group.members
    rig.deliver(first, 66, logprobs=logprobs_of(66))
    assert list(group.channel.items) == [
        Delta(
            "before",
            (66,),
            logprobs=(logprobs_of(66),),
            finish_reason="stop",
            stop_reason="STOP",
        )
    ]
    assert (rig.left, rig.forgotten, end_of(group)) == ([first], [], None)
    rig.deliver(second, 5, "length")
    assert group.channel.stream_end.last_delta == Delta("5 ", (5,), index=1)
    assert (rig.left, rig.forgotten, rig.counts) == ([first], [group], (1, 0, 0))


# --- wakes ------------------------------------------------------------------------------


def test_reader_is_woken_once_for_all_unread():
    rig = Rig()
    mailbox, others = Mailbox(), Mailbox()
    groups = [rig.group(name=str(i)) for i in range(4)]
    for group, box in zip(groups, (mailbox, mailbox, others, None), strict=True):
        group.channel.mailbox = box
        group.channel.has_reader = True
        for _ in range(2):
            rig.deliver(group.members[0], 5)
        assert group.channel.has_reader is False
    rig.processor.flush_wakeups()
    channels = [group.channel for group in groups]
    assert (mailbox.notified, others.notified) == ([channels[:2]], [channels[2:3]])
    rig.processor.flush_wakeups()
    assert (len(mailbox.notified), len(others.notified)) == (1, 1)


def test_non_waiting_reader_is_not_woken():
    rig = Rig()
    group = rig.group()
    group.channel.mailbox = mailbox = Mailbox()
    rig.deliver(group.members[0], 5)
    rig.processor.flush_wakeups()
    assert mailbox.notified == []
    # An end is told in any case.
    rig.deliver(group.members[0], 5, "length")
    rig.processor.flush_wakeups()
    assert mailbox.notified == [[group.channel]]


@pytest.mark.parametrize("waiting", [False, True])
def test_streams_of_a_closed_loop_are_aborted(waiting):
    rig = Rig()
    closed, mailbox = Mailbox(closed=True), Mailbox()
    gone, silent, there = (rig.group(name=name) for name in ("gone", "silent", "there"))
    # Groups without a reader, and some without a channel, belong to no loop.
    unread, inner = rig.group(name="unread"), RequestGroup("inner")
    Request(inner, SamplingParams(), token_ids=[1], max_model_len=8)
    rig.groups.append(inner)
    gone.channel.mailbox = silent.channel.mailbox = closed
    there.channel.mailbox = mailbox
    for group in (gone, there):
        group.channel.has_reader = waiting
        rig.deliver(group.members[0], 5)
    rig.processor.flush_wakeups()
    for group in (gone, silent):
        assert end_of(group) == ("abort", None, "")
        assert group.cancelled
    assert end_of(there) is end_of(unread) is None
    assert [group.cancelled for group in (there, unread, inner)] == [False] * 3
    assert rig.counts == (0, 2, 0)
    # Asked once for what was delivered once.
    closed.closed = False
    mailbox.closed = True
    rig.processor.flush_wakeups()
    assert end_of(there) is None


def test_dead_engine_wakes_every_waiter():
    rig = Rig()
    groups = [rig.group(name=str(i)) for i in range(3)]
    mailbox, closed = Mailbox(), Mailbox(closed=True)
    for group, box in zip(groups, (mailbox, closed, None), strict=True):
        group.channel.mailbox = box
        rig.processor.abort(group)
    for count in (1, 2):
        rig.processor.flush_all_wakeups()
        assert mailbox.notified == [[groups[0].channel]] * count
        assert closed.notified == [[groups[1].channel]] * count


# --- slow readers -----------------------------------------------------------------------


def test_slow_reader_pauses_and_resumes_group_once():
    rig = Rig()
    group = rig.group(2, max_unread=2, on_slow="pause")
    first, second = group.members
    rig.deliver(first, 5)
    assert (rig.calls, group.channel.is_backpressured) == ([], False)
    rig.deliver(second, 5)
    assert rig.calls == [("pause", first), ("pause", second)]
    assert group.channel.is_backpressured is True
    rig.deliver(first, 5)
    assert len(rig.calls) == 2
    rig.processor.resume_group(group)
    assert rig.calls[2:] == [("resume", first), ("resume", second)]
    assert group.channel.is_backpressured is False
    rig.processor.resume_group(group)
    assert len(rig.calls) == 4
    assert end_of(group) is None
    rig.processor.resume_group(RequestGroup("without a channel"))


def test_reader_that_catches_up_is_resumed():
    rig = Rig()
    group = rig.group(max_unread=2, on_slow="pause")
    (request,) = group.members
    channel = group.channel
    pause = rig.processor._scheduler.pause

    def read_meanwhile(one):
        pause(one)
        channel.num_read += 1

    rig.processor._scheduler.pause = read_meanwhile
    rig.deliver(request, 5)
    rig.deliver(request, 5)
    assert rig.calls == [("pause", request), ("resume", request)]
    assert channel.is_backpressured is False


# --- ends -------------------------------------------------------------------------------


def test_abort_releases_held_text_and_counts_once():
    rig = Rig()
    group = rig.group()
    rig.deliver(group.members[0], 99)
    rig.processor.abort(group)
    assert (end_of(group), rig.counts) == (("abort", None, "99 "), (0, 1, 0))
    for _ in range(2):
        rig.processor.abort(group)
        rig.processor.fail(group, RequestError("late"))
    assert (rig.counts, rig.forgotten) == ((0, 1, 0), [group])
    assert rig.notifier.told == ["first", (6.0, None)]


@pytest.mark.parametrize("detokenizer", [True, False])
def test_an_abort_needs_no_text(detokenizer):
    rig = Rig()
    group = rig.group()
    if detokenizer:
        rig.deliver(group.members[0], 99)
        rig.deliver(group.members[0], 99)
    else:
        group.members[0].output.detokenizer = None
    rig.processor.abort(group)
    assert end_of(group) == ("abort", None, "")


def test_an_abort_ends_each_member_that_lives():
    rig = Rig()
    group = rig.group(4)
    members = list(group.members)
    done, held, _, last = members
    rig.deliver(done, 5, "length")
    rig.deliver(held, 99)
    group.channel.items.clear()
    rig.processor.abort(group)
    assert [(d.index, d.text, d.finish_reason) for d in group.channel.items] == [
        (1, "99 ", "abort"),
        (2, "", "abort"),
    ]
    assert end_of(group) == ("abort", None, "")
    assert [m.finish_reason for m in members] == ["length", "abort", "abort", "abort"]
    assert (rig.left, rig.forgotten, last.is_finished) == (members[:3], [group], True)


@pytest.mark.parametrize("own", [True, False])
def test_an_error_ends_the_whole_group(own):
    rig = Rig()
    group = rig.group(2, name="name")
    members = list(group.members)
    error = RequestError("busy") if own else ZeroDivisionError("why")
    rig.processor.deliver((members[0], -1, None, error), rig.now)
    final = end_of(group)
    if own:
        assert final is error
    else:
        assert type(final) is RequestError
        assert str(final) == "request 'name' failed: ZeroDivisionError('why')"
        assert final.__cause__ is error
    assert all(member.is_finished for member in members)
    assert [member.finish_reason for member in members] == [None, None]
    assert (rig.counts, rig.forgotten) == ((0, 0, 1), [group])
    assert rig.notifier.told == [(6.0, final)]


def test_undecodable_text_fails_the_request():
    rig = Rig()
    group = rig.group()
    rig.deliver(group.members[0], 5)
    rig.deliver(group.members[0], 13)
    assert type(end_of(group)) is RequestError
    assert isinstance(end_of(group).__cause__, KeyboardInterrupt)
    assert len(group.channel.items) == 1


def test_error_of_aborted_member_holds_nothing_back():
    rig = Rig()
    group = rig.group()
    rig.deliver(group.members[0], 99)
    group.members[0].output.detokenizer.finish = pytest.fail
    rig.processor.fail(group, RequestError("failed"))
    assert rig.counts == (0, 0, 1)


# --- accounts ---------------------------------------------------------------------------


def test_usage_is_of_all_members_from_the_earliest_on():
    group = Rig().group(3)
    first, second, _ = group.members
    usage = make_usage(group, group.members, 20.0)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 0, 0)
    assert (usage.queue_time, usage.ttft, usage.total_time) == (16.0, None, 16.0)
    first.num_cached_tokens = 2
    first.token_ids += [5]
    second.token_ids += [6, 7]
    first.first_scheduled_at, second.first_scheduled_at = 7.0, 6.0
    first.first_token_at, second.first_token_at = 9.0, 9.5
    usage = make_usage(group, group.members, 20.0)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 3, 2)
    assert (usage.queue_time, usage.ttft, usage.total_time) == (2.0, 5.0, 16.0)


def test_partial_result_has_output_of_every_member():
    group = Rig().group(3)
    assert make_partial_completion(group, 20.0) is None
    first, second, third = group.members
    second.token_ids += [6, 7]
    third.token_ids += [8]
    third.output.decode = lambda token_ids: 1 / 0
    partial = make_partial_completion(group, 20.0)
    assert (partial.request_id, partial.prompt_token_ids) == ("g", (1, 2))
    assert [(o.index, o.text, o.token_ids, o.finish_reason) for o in partial.outputs] == [
        (0, "", (), None),
        (1, "6,7,", (6, 7), None),
        (2, "", (8,), None),
    ]
    assert partial.usage.total_time == 16.0
    assert first.num_output_tokens == 0
