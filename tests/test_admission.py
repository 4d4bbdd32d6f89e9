"""Admission: places in the queue, and when the next is likely to be free. With a clock of its
own."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from asyncllm import EngineClosedError, EngineOverloadedError, InvalidRequestError, SamplingParams
from asyncllm.core.admission import Admission
from asyncllm.core.request import Request, RequestGroup


def request(request_id, owner=None):
    """A group of one."""
    group = RequestGroup(request_id)
    Request(group, SamplingParams(), token_ids=[1], max_model_len=10, owner=owner)
    return group


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def refused(admission, num_tokens=1, request_id="one more"):
    with pytest.raises(EngineOverloadedError) as caught:
        admission.reserve(request(request_id), num_tokens)
    return caught.value


def drain(admission, count):
    """So many requests enter the queue and leave it, all at one time."""
    for _ in range(count):
        gone = request("gone")
        admission.reserve(gone, 1)
        admission.forget_group(gone)


def drained_at(rate, clock, seconds=60.0):
    """An admission whose queue was left by ``rate`` requests a second for a while, then filled
    with ten requests of ten tokens."""
    admission = Admission(10, 1000, clock)
    for i in range(int(rate * seconds)):
        one = request(f"old{i}")
        admission.reserve(one, 1)
        clock.now += 1 / rate
        admission.forget_group(one)
    for i in range(10):
        admission.reserve(request(f"queued{i}"), 10)
    return admission


@pytest.mark.parametrize("rate", [0.5, 5.0, 80.0])
def test_retry_after_is_one_place_at_the_measured_rate(clock, rate):
    error = refused(drained_at(rate, clock), 10)
    assert error.retry_after == pytest.approx(1 / rate, rel=0.3, abs=0.01)


def test_retry_after_grows_while_nothing_moves(clock):
    admission = drained_at(5.0, clock)
    waits = []
    for _ in range(4):
        waits.append(refused(admission, 10).retry_after)
        clock.now += 5.0
    # The estimate of the rate halves every five seconds.
    assert [b / a for a, b in itertools.pairwise(waits)] == pytest.approx([2, 2, 2])


def test_before_anything_was_measured(clock):
    admission = Admission(1, 10, clock)
    admission.reserve(request("a"), 1)
    assert refused(admission).retry_after == 1.0


def test_queue_is_full_at_its_limits_and_not_before(clock):
    admission = Admission(2, 100, clock)
    admission.reserve(request("a"), 60)
    assert "60 prompt tokens are queued and 41 more" in str(refused(admission, 41))
    admission.reserve(request("b"), 40)
    assert "2 requests are queued, max_queued_requests=2" in str(refused(admission, 0))
    assert (len(admission.queued_requests), admission.num_live_requests) == (2, 2)
    assert (admission.num_requests, admission.num_rejected) == (2, 2)
    assert admission.get_live_group("one more") is None


def test_whether_there_is_room_can_be_asked_without_taking_it(clock):
    admission = drained_at(5.0, clock)
    assert admission.retry_after(request("new"), 10) == refused(admission, 10).retry_after > 0.0
    assert admission.retry_after(request("new", "another owner"), 10) == 0.0
    before = admission.num_requests, admission.num_rejected, len(admission.queued_requests)
    for _ in range(3):
        assert admission.retry_after(request("new", "another owner"), 10) == 0.0
        assert admission.retry_after(request("new"), 10) > 0.0
    assert (
        admission.num_requests,
        admission.num_rejected,
        len(admission.queued_requests),
    ) == before
    assert admission.num_queued_tokens == 100
    admission.reserve_or_wait(request("in line"), 10, lambda: False)
    empty = Admission(10, 1000, clock)
    assert empty.retry_after(request("new"), 5000) == 0.0


def fill(admission, owner, num_tokens=1):
    """Groups of an owner that the queue takes until it is full."""
    groups = []
    while len(groups) < 100:
        group = request(f"{owner}{admission.num_requests}", owner)
        try:
            admission.reserve(group, num_tokens)
        except EngineOverloadedError:
            break
        groups.append(group)
    return groups


def test_owners_have_shares_of_a_full_queue(clock):
    admission = Admission(10, 1000, clock)
    queued = {owner: fill(admission, owner) for owner in "abc"}
    assert [len(groups) for groups in queued.values()] == [10, 5, 4]
    assert fill(admission, "a") == []
    for group in [*queued["b"], *queued["c"]]:
        admission.forget_group(group)
    assert fill(admission, "a") == []
    admission.forget_group(queued["a"].pop())
    admission.reserve(request("again", "a"), 1)
    assert (len(admission.queued_requests), admission.num_queued_tokens) == (10, 10)


def test_prompt_tokens_have_shares_and_a_long_prompt_fits(clock):
    admission = Admission(100, 100, clock)
    assert len(fill(admission, "a", 20)) == 5
    assert len(fill(admission, "b", 20)) == 2
    assert len(fill(admission, "c", 50)) == 1
    assert len(fill(admission, "d", 1)) == 10


def test_many_owners_hold_twice_the_limits_together(clock):
    admission = Admission(10, 1000, clock)
    queued = [len(fill(admission, f"owner {i} ")) for i in range(30)]
    assert (queued[:3], sum(queued)) == ([10, 5, 4], 20)


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_a_group_larger_than_a_share_holds_nobody_up(clock, num_tokens):
    """Five owners keep the queue full, each with its share, so it never has room for the group."""
    admission = Admission(12, 1000, clock)
    for owner in "abcde" * 2:
        admission.reserve(request(f"{owner}{admission.num_requests}", owner), 50)
    large = RequestGroup("large")
    for _ in range(4):
        Request(large, SamplingParams(), token_ids=[1], max_model_len=10, owner="x")
    places = [admission.reserve_or_wait(large, num_tokens, lambda: False)]
    places += [
        admission.reserve_or_wait(request(f"later{i}", "y"), 1, lambda: False) for i in range(2)
    ]
    assert places == [None, None, None]
    assert len(admission.queued_requests) == 16


def test_owner_past_its_share_waits_and_others_pass(clock):
    admission = Admission(4, 1000, clock)
    first = fill(admission, "a")
    waiting = admission.reserve_or_wait(request("late", "a"), 1, lambda: False)
    assert waiting is not None
    assert len(fill(admission, "b")) == 2
    with pytest.raises(EngineOverloadedError, match="1 wait for a place"):
        admission.reserve(request("later", "a"), 1)
    for group in first[:2]:
        admission.forget_group(group)
        assert not waiting.done()
    admission.forget_group(first[2])
    assert waiting.result(0)


def test_owners_in_line_take_turns(clock):
    """An owner's first call waits behind one of another owner that has many."""
    admission = Admission(4, 1000, clock)
    queued = fill(admission, "a") + fill(admission, "b")
    assert len(queued) == 6
    line = []
    for name in ("1 a", "2 a", "3 a", "1 b", "2 b"):
        waiting = admission.reserve_or_wait(request(name, name[-1]), 1, lambda: False)
        assert waiting is not None
        line.append((name, waiting))
    told = []
    for group in queued:
        admission.forget_group(group)
        told.append([name for name, waiting in line if waiting.done()])
    assert told[1:4] == [[], ["1 a"], ["1 a", "2 a", "1 b"]]
    assert told[5] == ["1 a", "2 a", "1 b", "2 b"]


def test_prompt_longer_than_the_queue_waits_alone(clock):
    admission = Admission(5, 10, clock)
    admission.reserve(request("long"), 50)
    refused(admission, 1)


def test_rate_halves_every_five_seconds(clock):
    """The exponential average at its exact values, since the tests above accept a rate that is a
    third off."""
    admission = Admission(1, 1000, clock)
    expected = 0.0
    for gap in (0.0, 5.0, 1.0, 12.0):
        clock.now += gap
        one = request("a")
        admission.reserve(one, 1)
        admission.forget_group(one)
        expected = expected * 0.5 ** (gap / 5.0) + 0.6931 / 5.0
        admission.reserve(one, 1)
        assert refused(admission).retry_after == pytest.approx(1 / expected)
        clock.now += 2.5
        assert refused(admission).retry_after == pytest.approx(2**0.5 / expected)
        clock.now -= 2.5
        admission.remove_from_queue(one.members[:1])
        expected += 0.6931 / 5.0
        admission.forget_group(one)


def test_leaving_twice_counts_once(clock):
    admission = Admission(2, 100, clock)
    one, other = request("a"), request("b")
    admission.reserve(one, 30)
    admission.reserve(other, 60)
    admission.remove_from_queue(one.members[:1])
    admission.remove_from_queue(one.members[:1])
    admission.forget_group(one)
    assert (len(admission.queued_requests), admission.num_live_requests) == (1, 1)
    # Of the 100 tokens 60 are taken, and the rate is that of one departure.
    error = refused(admission, 41)
    assert error.retry_after == pytest.approx(5.0 / 0.6931)
    admission.reserve(request("c"), 40)


@pytest.mark.parametrize(
    ("sizes", "limits", "num_tokens", "surplus"),
    [
        ([10] * 4, (4, 1000), 10, 1),
        ([10] * 6, (4, 1000), 10, 3),
        ([10] * 4, (100, 45), 10, 1),
        ([10] * 4, (100, 40), 26, 3),
        ([10] * 4, (100, 20), 10, 3),
        ([50] * 2, (100, 100), 1, 1),
        ([0] * 2, (100, 10), 12, 4),
    ],
)
def test_retry_after_counts_places_to_free(clock, sizes, limits, num_tokens, surplus):
    admission = Admission(100, 10_000, clock)
    drain(admission, 200)
    rate = 200 * 0.6931 / 5.0
    for i, size in enumerate(sizes):
        admission.reserve(request(f"queued{i}"), size)
    admission.max_queued_requests, admission.max_queued_tokens = limits
    assert refused(admission, num_tokens).retry_after == pytest.approx(surplus / rate)


def test_retry_after_has_bounds(clock):
    admission = Admission(1, 1000, clock)
    drain(admission, 1000)
    admission.reserve(request("a"), 1)
    assert refused(admission).retry_after == 0.01
    rate = 1000 * 0.6931 / 5.0
    # The rate at which a minute is what one place takes, from both sides.
    halvings = math.log2(rate * 60.0)
    clock.now += 5.0 * halvings - 0.01
    assert 59.0 < refused(admission).retry_after < 60.0
    clock.now += 0.02
    assert refused(admission).retry_after == 60.0


def test_a_prompt_is_corrected_only_while_it_is_queued(clock):
    admission = Admission(10, 100, clock)
    one, other = request("a"), request("b")
    admission.reserve(one, 50)
    admission.reserve(other, 10)
    admission.correct_estimate(one, 70)
    assert "80 prompt tokens are queued" in str(refused(admission, 21))
    admission.remove_from_queue(one.members[:1])
    admission.correct_estimate(one, 10_000)
    admission.reserve(request("c"), 90)
    assert "100 prompt tokens are queued" in str(refused(admission, 1))


def test_aborted_id_can_be_reused_while_first_request_ends(clock):
    admission = Admission(10, 100, clock)
    first = request("a")
    admission.reserve(first, 1)
    assert admission.get_live_group("a") is first
    with pytest.raises(InvalidRequestError, match="request_id='a'") as caught:
        admission.reserve(request("a"), 1)
    assert caught.value.param == "request_id"
    first.cancelled = True
    assert admission.get_live_group("a") is None
    second = request("a")
    admission.reserve(second, 1)
    assert (admission.num_live_requests, len(admission.queued_requests)) == (2, 2)
    assert [one.members[0].arrival_index for one in (first, second)] == [0, 1]
    assert set(admission.close(lambda: EngineClosedError("closed"))) == {first, second}
    admission.forget_group(first)
    assert (admission.num_live_requests, admission.get_live_group("a")) == (1, second)
    with pytest.raises(EngineClosedError):
        admission.reserve(request("c"), 1)
    admission.forget_group(second)
    assert (admission.num_live_requests, len(admission.queued_requests)) == (0, 0)


def test_a_caller_that_has_left_the_line_gets_no_place(clock):
    admission = Admission(1, 1000, clock)
    (first,) = fill(admission, None)
    gone, aborted, last = request("gone"), request("aborted"), request("last")
    admission.reserve_or_wait(gone, 1, lambda: True)
    admission.reserve_or_wait(aborted, 1, lambda: False)
    waiting = admission.reserve_or_wait(last, 1, lambda: False)
    assert waiting is not None
    aborted.cancelled = True
    admission.forget_group(first)
    assert waiting.result(0)
    assert (len(admission.queued_requests), len(admission.caller_queue)) == (1, 0)
    assert (gone.members, aborted.members, len(last.members)) == ([], [], 1)


def text(request_id, num_bytes, owner=None):
    """A group of one request, whose prompt has ``num_bytes``."""
    group = request(request_id, owner)
    group.num_text_bytes = num_bytes
    return group


def wait(admission, group):
    """Future of the place of a group that has to wait."""
    waiting = admission.reserve_or_wait(group, 1, lambda: False)
    assert waiting is not None
    return waiting


def test_groups_without_long_texts_pass_a_text_that_finds_no_room(clock):
    admission = Admission(10, 1000, clock)
    queued = [text(f"queued{i}", 2**24) for i in range(4)]
    queued[0].num_text_bytes -= 2**15
    for group in queued:
        admission.reserve(group, 1)
    large, small = wait(admission, text("large", 2**24)), wait(admission, text("small", 2**14))
    admission.reserve(request("short"), 1)
    assert admission.reserve_or_wait(request("other"), 1, lambda: False) is None
    # Of the groups with long texts none passes the first, although a small one would fit.
    with pytest.raises(EngineOverloadedError):
        admission.reserve(text("one more", 2**14), 1)
    assert not small.done()
    admission.correct_estimate(queued[1], 1)
    assert large.done()
    assert small.done()
    assert (len(admission.queued_requests), admission.waiting_texts.num_bytes) == (8, 2**26 - 2**14)


def test_a_text_that_found_no_room_comes_before_later_groups(clock):
    admission = Admission(2, 1000, clock)
    queued = [text("queued", 0), request("queued too")]
    queued[0].param_bytes = {1: 2**26}
    for group in queued:
        admission.reserve(group, 1)
    long = wait(admission, text("long", 2**14))
    earlier, later = request("earlier"), request("later")
    waiting = [wait(admission, group) for group in (earlier, later)]
    admission.forget_group(queued[1])
    assert [one.done() for one in (long, *waiting)] == [False, True, False]
    admission.forget_group(queued[0])
    assert [one.done() for one in (long, *waiting)] == [True, True, False]
    admission.forget_group(earlier)
    assert waiting[1].done()


def test_a_text_that_finds_no_room_costs_its_owner_no_share_for_others(clock):
    admission = Admission(4, 1000, clock)
    for i in range(4):
        admission.reserve(text(f"queued{i}", 2**24, "a"), 1)
    long = wait(admission, text("long", 2**24, "b"))
    admission.reserve(request("short", "b"), 1)
    assert (long.done(), len(admission.queued_requests)) == (False, 5)


def test_a_text_whose_room_is_taken_waits_again(clock):
    admission = Admission(5, 1000, clock)
    queued = [*(text(f"queued{i}", 2**24, "a") for i in range(4)), request("short", "a")]
    for group in queued:
        admission.reserve(group, 1)
    long = wait(admission, text("long", 2**24, "a"))
    admission.correct_estimate(queued[0], 1)  # Room, but no place.
    admission.reserve(text("others", 2**24, "b"), 1)
    later = wait(admission, request("later", "a"))
    for group in (queued[0], queued[4]):
        admission.forget_group(group)
    assert [long.done(), later.done()] == [False, True]
    admission.forget_group(queued[1])
    assert long.done()


def test_an_aborted_text_that_waits_for_room_leaves(clock):
    admission = Admission(2, 1000, clock)
    queued = text("queued", 0)
    queued.param_bytes = {1: 2**26}
    admission.reserve(queued, 1)
    aborted, withdrawn = text("aborted", 2**14), text("withdrawn", 2**14)
    assert not wait(admission, aborted).done()
    assert not wait(admission, withdrawn).done()
    last = wait(admission, text("last", 2**14))
    aborted.cancelled = True
    admission.caller_queue.withdraw(withdrawn)
    assert (aborted.members, withdrawn.members) == ([], [])
    assert len(admission.caller_queue) == 1
    admission.forget_group(queued)
    assert last.done()
    assert len(admission.caller_queue) == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_text_gets_its_place_and_no_free_place_waits_for_one(clock, seed):
    admission, draw = Admission(6, 1000, clock), random.Random(seed)
    queue, names, waiting, queued = admission.caller_queue, itertools.count(), {}, []
    for _ in range(400):
        size = draw.choice([0, 0, 2**14, 2**23, 2**24])
        group = text(str(next(names)), size, draw.choice("ab"))
        if size > 2**22:
            group.param_bytes = {next(names): draw.choice([2**24, 2**25])}
        future = admission.reserve_or_wait(group, 1, lambda: False)
        if future is None:
            queued.append(group)
        else:
            waiting[group] = future
        while queued and draw.random() < 0.5:
            group = queued.pop(draw.randrange(len(queued)))
            if draw.random() < 0.5:
                admission.forget_group(group)
            else:
                admission.correct_estimate(group, 1)
                admission.remove_from_queue(group.members[:1])
        queued += [group for group, future in waiting.items() if future.done()]
        waiting = {group: future for group, future in waiting.items() if not future.done()}
        assert len(queue) == len(waiting)
        owners = {group.members[0].owner for group in waiting}
        assert owners == {
            name for name in "ab" if queue.has_owner_ahead_of(text("new", 2**14, name))
        }
        if len(admission.queued_requests) < 6:
            assert all(group.num_text_bytes for group in waiting)
    while queued:
        admission.forget_group(queued.pop())
        queued += [group for group, future in waiting.items() if future.done()]
        waiting = {group: future for group, future in waiting.items() if not future.done()}
    assert (len(queue), len(waiting), admission.waiting_texts.num_bytes) == (0, 0, 0)
    assert not queue.has_owner_ahead_of(text("new", 2**14, "a"))
    assert not queue.has_owner_ahead_of(text("new", 2**14, "b"))
