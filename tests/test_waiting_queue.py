"""WaitingQueue: the policy's order, for any pushes and discards in between."""

from __future__ import annotations

import math
import random

import pytest

from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.waiting_queue import POLICIES, WaitingQueue
from asyncllm.sampling_params import SamplingParams


def request(arrival_index=0, priority=0, deadline=math.inf):
    return Request(
        RequestGroup(f"r{arrival_index}", deadline=deadline),
        SamplingParams(),
        token_ids=[1],
        max_model_len=8,
        arrival_index=arrival_index,
        priority=priority,
    )


def drained(queue):
    order = []
    while (first := queue.peek()) is not None:
        order.append(first)
        queue.discard(first)
    return order


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_order_is_the_policys_after_any_pushes_and_discards(policy, seed):
    rng = random.Random(seed)
    queue, members, known = WaitingQueue(policy), [], []
    for index in range(300):
        if members and rng.random() < 0.4:
            gone = members.pop(rng.randrange(len(members)))
            queue.discard(gone)
            known.append(gone)
        elif known and rng.random() < 0.3:
            back = known.pop(rng.randrange(len(known)))
            queue.push(back)
            members.append(back)
        else:
            new = request(index, rng.randrange(3), rng.choice([math.inf, 5.0, 9.0]))
            queue.push(new)
            members.append(new)
        assert len(queue) == len(members)
        assert set(queue) == set(members)
    key = {
        "fcfs": lambda r: r.arrival_index,
        "priority": lambda r: (r.priority, r.arrival_index),
        "deadline": lambda r: (r.priority, r.group.deadline, r.arrival_index),
    }[policy]
    assert drained(queue) == sorted(members, key=key)
    assert len(queue) == 0


def test_equal_ranks_go_in_the_order_in_which_they_were_pushed():
    queue = WaitingQueue("fcfs")
    requests = [request() for _ in range(3)]
    for one in requests:
        queue.push(one)
    assert drained(queue) == requests


def test_push_gives_the_rank_that_victims_are_chosen_by():
    one = request(3, priority=2, deadline=7.0)
    for policy, key in (("fcfs", (3,)), ("priority", (2, 3)), ("deadline", (2, 7.0, 3))):
        WaitingQueue(policy).push(one)
        assert one.sort_key == key


def test_discarding_what_is_not_waiting_changes_nothing():
    queue = WaitingQueue("fcfs")
    one, other = request(0), request(1)
    queue.push(one)
    queue.discard(other)
    assert len(queue) == 1
    queue.discard(one)
    queue.discard(one)
    assert queue.peek() is None


def test_discarded_requests_are_let_go():
    """Those that wait behind one that stays are not kept until their turn comes."""
    queue = WaitingQueue("fcfs")
    first = request(0)
    queue.push(first)
    for index in range(1, 1000):
        later = request(index)
        queue.push(later)
        queue.discard(later)
    assert queue._num_entries <= 65
    assert drained(queue) == [first]
    crowd = [request(index) for index in range(200)]
    for one in crowd:
        queue.push(one)
    for one in crowd:
        queue.discard(one)
    assert queue._num_entries <= 65
