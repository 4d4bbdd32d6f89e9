"""Admission: places in the queue, and when the next is likely to be free. With a clock of its
own."""

from __future__ import annotations

import itertools

import pytest

from asyncllm import EngineClosedError, EngineOverloadedError, InvalidRequestError, SamplingParams
from asyncllm.core.admission import Admission
from asyncllm.core.request import Request
from asyncllm.core.request_group import RequestGroup


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def request(request_id):
    """A group of one."""
    group = RequestGroup(request_id)
    Request(group, SamplingParams(), token_ids=[1], max_model_len=10)
    return group


@pytest.fixture
def clock():
    return Clock()


def drained_at(rate, clock, seconds=60.0):
    """An admission whose queue was left by ``rate`` requests a second for a while, then filled
    with ten requests of ten tokens."""
    admission = Admission(10, 1000, clock)
    for i in range(int(rate * seconds)):
        one = request(f"old{i}")
        admission.reserve(one, 1)
        clock.now += 1 / rate
        admission.forget(one)
    for i in range(10):
        admission.reserve(request(f"queued{i}"), 10)
    return admission


@pytest.mark.parametrize("rate", [0.5, 5.0, 80.0])
def test_retry_after_is_one_place_at_the_measured_rate(clock, rate):
    admission = drained_at(rate, clock)
    with pytest.raises(EngineOverloadedError) as caught:
        admission.reserve(request("one more"), 10)
    assert caught.value.retry_after == pytest.approx(1 / rate, rel=0.3, abs=0.01)


def test_retry_after_grows_while_nothing_moves(clock):
    admission = drained_at(5.0, clock)
    waits = []
    for _ in range(4):
        with pytest.raises(EngineOverloadedError) as caught:
            admission.reserve(request("one more"), 10)
        waits.append(caught.value.retry_after)
        clock.now += 5.0
    # The estimate of the rate halves every five seconds.
    assert [b / a for a, b in itertools.pairwise(waits)] == pytest.approx([2, 2, 2])
    clock.now += 10_000
    with pytest.raises(EngineOverloadedError) as caught:
        admission.reserve(request("one more"), 10)
    assert caught.value.retry_after == 60.0


def test_retry_after_counts_the_places_that_many_tokens_need(clock):
    admission = drained_at(5.0, clock)
    admission.max_queued_requests = 100
    admission.max_queued_tokens = 120
    with pytest.raises(EngineOverloadedError, match="100 prompt tokens") as caught:
        admission.reserve(request("long"), 70)
    # 50 tokens too many, and a queued request has ten.
    assert caught.value.retry_after == pytest.approx(5 / 5.0, rel=0.3)


def test_before_anything_was_measured(clock):
    admission = Admission(1, 10, clock)
    admission.reserve(request("a"), 1)
    with pytest.raises(EngineOverloadedError) as caught:
        admission.reserve(request("b"), 1)
    assert caught.value.retry_after == 1.0
    assert admission.num_rejected == 1


def test_an_estimate_is_corrected(clock):
    admission = Admission(10, 100, clock)
    long = request("long")
    admission.reserve(long, 95)
    with pytest.raises(EngineOverloadedError):
        admission.reserve(request("b"), 10)
    admission.correct(long.members[0], 20)
    admission.reserve(request("b"), 80)


def test_ids_ranks_and_closing(clock):
    admission = Admission(10, 100, clock)
    first, second = request("a"), request("b")
    admission.reserve(first, 1)
    admission.reserve(second, 1)
    assert (first.members[0].arrival_index, second.members[0].arrival_index) == (0, 1)
    with pytest.raises(InvalidRequestError):
        admission.reserve(request("a"), 1)
    first.cancelled = True
    assert admission.get("a") is None
    again = request("a")
    admission.reserve(again, 1)
    assert admission.get("a") is again
    assert set(admission.close(lambda: EngineClosedError("closed"))) == {first, second, again}
    admission.forget(first)
    assert admission.get("a") is again
    assert admission.num_live == 2
    with pytest.raises(EngineClosedError):
        admission.reserve(request("c"), 1)
