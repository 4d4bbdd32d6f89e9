"""WaitingQueue: policy order and turns by owner."""

from __future__ import annotations

import math
import sys

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.waiting_queue import RANK_FUNCTION_BY_POLICY, WaitingQueue
from asyncllm.sampling_params import SamplingParams
from tests.hypothesis_settings import quick_and_slow
from tests.integrity import check_waiting_queue


def request(arrival_index=0, priority=0, deadline=math.inf, owner=None):
    return Request(
        RequestGroup(f"r{arrival_index}", deadline=deadline),
        SamplingParams(),
        token_ids=[1],
        max_model_len=8,
        arrival_index=arrival_index,
        priority=priority,
        owner=owner,
    )


def drained(queue):
    order = []
    while (first := queue.peek()) is not None:
        order.append(first)
        queue.discard(first)
    return order


def test_push_returns_the_preemption_rank():
    one = request(3, priority=2, deadline=7.0)
    for policy, key in (("fcfs", (3,)), ("priority", (2, 3)), ("deadline", (2, 7.0, 3))):
        WaitingQueue(policy).push(one)
        assert one.sort_key == key


def test_discarding_a_non_waiting_request_changes_nothing():
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
        num_references = sys.getrefcount(later)
        queue.push(later)
        queue.discard(later)
        assert sys.getrefcount(later) == num_references
    assert queue._num_entries <= 65
    assert drained(queue) == [first]
    crowd = [request(index) for index in range(200)]
    for one in crowd:
        queue.push(one)
    for one in crowd:
        queue.discard(one)
    assert queue._num_entries <= 65


RANKS = {
    "fcfs": lambda r: 0,
    "priority": lambda r: r.priority,
    "deadline": lambda r: (r.priority, r.group.deadline),
}


class PlainQueue:
    """The rules in plain words, over lists: which waiting request is next?"""

    def __init__(self, policy):
        self.rank = RANKS[policy]
        self.waiting, self.running, self.admitted_at = [], [], {}

    def next(self):
        if not self.waiting:
            return None
        best = min(map(self.rank, self.waiting))
        heads = {}
        for one in sorted(self.waiting, key=lambda r: (self.rank(r), r.arrival_index)):
            if self.rank(one) == best:
                heads.setdefault(one.owner, one)
        return min(heads.values(), key=lambda r: (self.num_running(r.owner), self.turn(r)))

    def num_running(self, owner):
        return sum(one.owner == owner for one in self.running)

    def turn(self, head):
        """When its owner came to the line: with the request, or when it was last admitted."""
        return max((head.arrival_index, 0), self.admitted_at.get(head.owner, (-1, 0)))

    def forget_idle_owners(self):
        live = {one.owner for one in (*self.waiting, *self.running)}
        self.admitted_at = {name: at for name, at in self.admitted_at.items() if name in live}


class OwnersMachine(RuleBasedStateMachine):
    """Groups of several owners arrive, late ones too, are admitted to a few slots, preempted,
    aborted, paused, resumed and finished. The next request is always the plain queue's, and no
    owner is admitted beyond its share while others of that rank wait."""

    @initialize(policy=st.sampled_from(sorted(RANK_FUNCTION_BY_POLICY)), slots=st.integers(1, 6))
    def make(self, policy, slots):
        self.queue, self.plain, self.slots = WaitingQueue(policy), PlainQueue(policy), slots
        self.arrived = self.newest = self.num_admitted = 0
        self.late, self.paused = [], []

    @rule(
        owner=st.sampled_from([None, "a", "b", "c"]),
        priority=st.integers(0, 1),
        deadline=st.sampled_from([5.0, math.inf]),
        n=st.integers(1, 4),
        is_late=st.booleans(),
    )
    def arrive(self, owner, priority, deadline, n, is_late):
        group = [request(self.arrived + i, priority, deadline, owner) for i in range(n)]
        self.arrived += n
        if is_late:
            self.late.append(group)
        else:
            self.push(group)

    @precondition(lambda self: self.late)
    @rule()
    def late_prompt(self):
        """A prompt was tokenised elsewhere, and comes after later ones."""
        self.push(self.late.pop())

    def push(self, requests):
        for one in requests:
            self.queue.push(one)
            self.plain.waiting.append(one)
            self.newest = max(self.newest, one.arrival_index)

    @precondition(lambda self: self.plain.waiting and len(self.plain.running) < self.slots)
    @rule(times=st.integers(1, 6))
    def admit(self, times):
        plain = self.plain
        for _ in range(times):
            one = self.queue.peek()
            if one is None or len(plain.running) == self.slots:
                return
            assert one is plain.next()
            same = {r.owner for r in plain.waiting if plain.rank(r) == plain.rank(one)}
            self.queue.admit(one)
            plain.waiting.remove(one)
            plain.running.append(one)
            self.num_admitted += 1
            plain.admitted_at[one.owner] = (self.newest, self.num_admitted)
            share = -(-self.slots // len(same))
            assert len(same) == 1 or plain.num_running(one.owner) <= share

    @precondition(lambda self: self.plain.running)
    @rule(data=st.data(), then=st.sampled_from(["finish", "preempt", "pause"]))
    def leave(self, data, then):
        one = data.draw(st.sampled_from(self.plain.running))
        self.queue.release(one)
        self.plain.running.remove(one)
        self.plain.forget_idle_owners()
        if then == "preempt":
            self.push([one])
        elif then == "pause":
            self.paused.append(one)

    @precondition(lambda self: self.plain.waiting)
    @rule(data=st.data())
    def abort(self, data):
        one = data.draw(st.sampled_from(self.plain.waiting))
        self.queue.discard(one)
        self.plain.waiting.remove(one)
        self.plain.forget_idle_owners()

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self):
        self.push([self.paused.pop()])

    @invariant()
    def agrees(self):
        if hasattr(self, "queue"):
            assert self.queue.peek() is self.plain.next()
            assert set(self.queue) == set(self.plain.waiting)
            assert len(self.queue) == len(self.plain.waiting)
            check_waiting_queue(self.queue, self.plain.running)


TestOwners, TestManyOwners = quick_and_slow(OwnersMachine, 200)


def test_an_owner_without_requests_is_forgotten():
    queue = WaitingQueue("fcfs")
    for index in range(5000):
        one, other = request(index, owner=f"{index}"), request(index, owner=f"{index}")
        for each in (one, other):
            queue.push(each)
        queue.discard(other)
        queue.admit(one)
        queue.release(one)
    assert (len(queue._owners), queue._num_entries) == (0, 0)
    assert len(queue._owner_heap) <= 65
    assert queue.peek() is None
