"""State machines of the scheduler, driven by hypothesis."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.core.request import Request, Status
from tests.integrity import check_scheduler
from tests.scheduler_rig import Rig, group, info, longest_context

LIMITS = {
    "max_num_seqs": st.integers(1, 5),
    "max_num_batched_tokens": st.integers(1, 24),
    "policy": st.sampled_from(["fcfs", "priority", "deadline"]),
}
DEPTHS = st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 4)]).map(
    lambda pair: dict(zip(("pipeline_depth", "max_tokens_per_row"), pair, strict=True))
)


def room_for(groups, num_blocks: int, step_tokens: int) -> tuple[int, int]:
    """At least ``num_blocks``, and the longest context that they hold, of two tokens or more."""
    specs = [group(i, *one) for i, one in enumerate(groups)]
    while (longest := longest_context(specs, num_blocks - 1, step_tokens)) < 2:
        num_blocks += 1
    return num_blocks, longest


def longest(num_blocks: int, block_size) -> int:
    """Tokens whose KV the blocks hold in every group."""
    sizes = [group.block_size for group in info(block_size).kv_groups]
    fits = (n for n in itertools.count(1) if sum(-(-n // s) for s in sizes) > num_blocks)
    return next(fits) - 1


class SchedulerMachine(RuleBasedStateMachine):
    """Tiny pools, few distinct tokens (so that prefixes are shared), aborts, pauses, failed
    steps, prompt log-probabilities, tokens drawn with the host, several KV groups, recurrent
    states, depth 1 and 2, several tokens per row, every policy, several owners, further outputs of
    a prompt. Outputs must equal those without any cache."""

    @initialize(
        num_blocks=st.integers(5, 14),
        block_size=st.sampled_from([1, 2, 3, 4, (2, 2), (1, 3), (4, 2), (2, 3, 4)]),
        depth=DEPTHS,
        caching=st.booleans(),
        states=st.booleans(),
        **LIMITS,
    )
    def make(self, num_blocks, block_size, depth, states, **changes):
        changes |= depth | {"has_states": states and depth["max_tokens_per_row"] == 1}
        model_len = longest(num_blocks - 1, block_size)
        changes |= {"num_blocks": num_blocks, "max_model_len": model_len}
        self.begin(Rig(block_size=block_size, **changes))

    def begin(self, rig: Rig) -> None:
        self.rig = rig
        self.requests: list[Request] = []

    @rule(data=st.data())
    def add(self, data):
        longest = min(self.rig.info.max_model_len - 1, 16)
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=longest))
        options = dict(
            max_tokens=data.draw(st.integers(1, 12)),
            priority=data.draw(st.integers(0, 2)),
            deadline=data.draw(st.sampled_from([1.0, 2.0, math.inf])),
            owner=data.draw(st.sampled_from([None, "a", "b"])),
            eos=data.draw(st.sampled_from([(), tuple(range(0, 997, 7))])),
            needs_host=data.draw(st.sampled_from([False, False, True])),
        )
        first = self.rig.add(
            prompt, prompt_logprobs=data.draw(st.sampled_from([None, None, 0, 2])), **options
        )
        self.requests.append(first)
        for _ in range(data.draw(st.sampled_from([0, 0, 1, 3]))):
            self.requests.append(self.rig.add(prompt, first=first, **options))

    def _pick(self, data, *states):
        return data.draw(st.sampled_from([r for r in self.requests if r.status in states]))

    def _any(self, *states):
        return any(r.status in states for r in self.requests)

    @precondition(lambda self: self._any(Status.WAITING, Status.RUNNING, Status.PAUSED))
    @rule(data=st.data())
    def abort(self, data):
        request = self._pick(data, Status.WAITING, Status.RUNNING, Status.PAUSED)
        self.rig.scheduler.finish(request, "abort")

    @precondition(lambda self: self._any(Status.WAITING, Status.RUNNING))
    @rule(data=st.data())
    def pause(self, data):
        self.rig.scheduler.pause(self._pick(data, Status.WAITING, Status.RUNNING))

    @precondition(lambda self: self._any(Status.PAUSED))
    @rule(data=st.data())
    def resume(self, data):
        self.rig.scheduler.resume(self._pick(data, Status.PAUSED))

    @rule(times=st.integers(1, 6))
    def run(self, times):
        for _ in range(times):
            self._turn()

    def _turn(self):
        rig = self.rig
        launched = None
        if len(rig.in_flight) < rig.info.pipeline_depth:
            launched = rig.launch()
            if launched is not None:
                assert launched.batch.num_tokens <= rig.info.max_num_batched_tokens
                assert len(launched.requests) <= rig.info.max_num_seqs
        if rig.in_flight and (launched is None or len(rig.in_flight) == rig.info.pipeline_depth):
            rig.collect()
        check_scheduler(rig.scheduler)

    @precondition(lambda self: self.rig.in_flight)
    @rule()
    def fail_what_is_in_flight(self):
        self.rig.executor.discard()
        self.rig.scheduler.roll_back_steps(self.rig.in_flight)
        self.rig.in_flight.clear()

    @rule()
    def reset(self):
        idle = all(not r.blocks for r in self.requests)
        assert self.rig.scheduler.kv.reset_prefix_cache() is idle

    @invariant()
    def sound(self):
        if hasattr(self, "rig"):
            check_scheduler(self.rig.scheduler)
            assert not self.rig.scheduler.failed

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        for request in self.requests:
            self.rig.scheduler.resume(request)
        for _ in range(5000):
            if not self.rig.scheduler.has_work() and not self.rig.in_flight:
                break
            self._turn()
        pool = self.rig.scheduler.kv.pool
        assert pool.num_free == pool.num_usable
        for request in self.requests:
            assert request.is_finished, request
            self.rig.expect(request)
            if request.finish_reason == "length":
                assert len(request.token_ids) == request.max_total_tokens
