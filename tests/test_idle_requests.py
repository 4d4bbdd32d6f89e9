"""IdleRequests: the order of victims, and its cost."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncllm.core.idle_requests import IdleRequests
from asyncllm.core.request import Request, RequestGroup, Status
from asyncllm.sampling_params import SamplingParams
from tests.hypothesis_settings import quick_and_slow


def idle_request(key, status=Status.PAUSED):
    request = Request(RequestGroup("r"), SamplingParams(), token_ids=[1], max_model_len=8)
    request.sort_key, request.status = key, status
    return request


class IdleRequestsMachine(RuleBasedStateMachine):
    """Against a list whose victim is the maximum."""

    def __init__(self):
        super().__init__()
        self.idle, self.model, self.arrivals = IdleRequests(), [], 0

    @rule(priority=st.integers(-2, 2), is_paused=st.booleans())
    def add(self, priority, is_paused):
        self.arrivals += 1
        status = Status.PAUSED if is_paused else Status.WAITING
        request = idle_request((priority, self.arrivals), status)
        self.idle.add(request)
        self.model.append(request)

    @rule(data=st.data())
    def change_status(self, data):
        if self.model:
            request = data.draw(st.sampled_from(self.model))
            is_paused = request.status is Status.PAUSED
            request.status = Status.WAITING if is_paused else Status.PAUSED
            self.idle.add(request)

    @rule(data=st.data())
    def discard(self, data):
        if self.model:
            request = data.draw(st.sampled_from(self.model))
            self.model.remove(request)
            del self.idle.entries[request]

    @invariant()
    def victims_agree(self):
        expected = max(
            self.model, key=lambda r: (r.status is Status.PAUSED, r.sort_key), default=None
        )
        assert self.idle.next_victim() is expected
        assert self.idle.entries.keys() == set(self.model)
        assert len(self.idle._heap) <= max(65, 4 * len(self.model) + 1)


TestIdleRequests, TestIdleRequestsSlow = quick_and_slow(IdleRequestsMachine, 200)


class Counted(int):
    """Part of a sort key that counts its comparisons."""

    comparisons = 0

    def __neg__(self):
        return Counted(-int(self))

    def __lt__(self, other):
        Counted.comparisons += 1
        return int(self) < int(other)

    def __eq__(self, other):
        Counted.comparisons += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


def test_a_victim_among_thousands_costs_no_scan():
    idle = IdleRequests()
    for i in range(4000):
        idle.add(idle_request((Counted(i * 1237 % 4001),)))
    Counted.comparisons = 0
    for _ in range(100):
        victim = idle.next_victim()
        assert victim is not None
        del idle.entries[victim]
    assert Counted.comparisons < 100 * 60
