"""Deadlines against a sorted list."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.core.deadlines import Deadlines
from asyncllm.core.request import Request, RequestGroup, Status
from asyncllm.sampling_params import SamplingParams
from tests.hypothesis_settings import examples


def group_at(deadline: float, arrival_index: int) -> RequestGroup:
    group = RequestGroup(f"r{arrival_index}", deadline=deadline)
    Request(group, SamplingParams(), max_model_len=8, arrival_index=arrival_index)
    return group


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30),
    st.lists(st.integers(0, 10), max_size=5),
)
def test_groups_expire_by_deadline_and_arrival(groups, times):
    """Those that end before their deadline never do."""
    deadlines, live = Deadlines(), []
    for i, (deadline, ended) in enumerate(groups):
        group = group_at(float(deadline), i)
        deadlines.add(group, len(groups))
        if ended:
            group.members[0].status = Status.FINISHED
        else:
            live.append(group)
    for now in sorted(times):
        due = sorted((g for g in live if g.deadline <= now), key=lambda g: g.deadline)
        assert list(deadlines.expire(now)) == due
        live = [g for g in live if g not in due]
        assert deadlines.earliest == min((g.deadline for g in live), default=math.inf)
        assert len(deadlines) >= len(live)
    assert list(deadlines.expire(math.inf)) == sorted(live, key=lambda g: g.deadline)
    assert len(deadlines) == 0


def test_group_ending_during_expiry_does_not_expire():
    deadlines = Deadlines()
    first, second = group_at(1.0, 0), group_at(1.0, 1)
    for group in (second, first):
        deadlines.add(group, 2)
    found = []
    for group in deadlines.expire(1.0):
        found.append(group)
        second.members[0].status = Status.FINISHED
    assert found == [first]


def test_ended_groups_are_dropped_past_64_and_four_times_the_live():
    deadlines, arrivals = Deadlines(), itertools.count()

    def add(num_live_requests: int, *, ended: bool = False) -> int:
        group = group_at(1.0, next(arrivals))
        deadlines.add(group, num_live_requests)
        if ended:
            group.members[0].status = Status.FINISHED
        return len(deadlines)

    for _ in range(64):
        add(1, ended=True)
    assert add(1, ended=True) == 65
    for _ in range(3):
        add(17, ended=True)
    assert add(17) == 69
    assert add(17) == 2
