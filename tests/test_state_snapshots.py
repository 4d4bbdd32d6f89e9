"""Snapshots of recurrent states: saves, hits and invalidation."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from asyncllm.core.state_snapshots import StateSnapshots
from asyncllm.metrics import EngineMetrics
from asyncllm.testing import FakeExecutor
from tests.fakes import Fake, FakeModelConfig, FakeTokenizer
from tests.hypothesis_settings import quick_and_slow
from tests.integrity import check_scheduler
from tests.metric_samples import samples
from tests.scheduler_machine import LIMITS, SchedulerMachine, room_for
from tests.scheduler_rig import Rig, info


class StateRig(Rig):
    """A Rig whose device has recurrent states.

    Args:
        groups: block size and window of each KV group.
        snapshots: slots for states of prefixes.
        interval: tokens of output between two of them.
    """

    def __init__(self, *groups, snapshots=8, interval=256, **changes):
        sizes, windows = zip(*(groups or [(4, None)]), strict=True)
        states = dict(has_states=True, num_state_snapshots=snapshots)
        super().__init__(block_size=sizes, windows=windows, **states | changes)
        kv = self.scheduler.kv
        if kv.states is not None:
            kv.states = StateSnapshots(snapshots, sizes, interval)

    @property
    def states(self) -> StateSnapshots:
        assert self.scheduler.kv.states is not None
        return self.scheduler.kv.states

    def run(self, prompt, max_tokens=1, **options):
        """A request from its submission to its end, and what it computed in each step."""
        one = self.add(prompt, max_tokens, **options)
        shapes = []
        while self.scheduler.has_work():
            step = self.launch()
            assert step is not None
            shapes += step.batch.counts
            self.collect()
        check_scheduler(self.scheduler)
        self.expect(one)
        return one, shapes


# --- where they are saved --------------------------------------------------------------------


def test_a_prompt_leaves_its_state_at_its_last_full_block():
    rig = StateRig()
    for length, shapes in ((9, [8, 1]), (8, [4, 4]), (5, [4, 1]), (4, [4]), (12, [8, 4])):
        rig.scheduler.kv.reset_prefix_cache()
        assert rig.run(range(length))[1] == shapes
        again, _ = rig.run([*range(length), 90])
        assert again.num_cached_tokens == sum(shapes[:-1])


def test_a_prefix_ends_where_a_block_of_every_group_does():
    rig = StateRig((4, None), (3, 5), num_blocks=80)
    assert rig.run(range(30))[1] == [24, 6]
    one, shapes = rig.run([*range(25), 90, 91])
    # The keys of the window end at 24 as well.
    assert (one.num_cached_tokens, shapes) == (24, [3])
    one, shapes = rig.run([*range(14), 92])
    assert (one.num_cached_tokens, shapes) == (0, [12, 3])
    assert rig.run([*range(14), 93])[0].num_cached_tokens == 12


@pytest.mark.parametrize(("snapshots", "most"), [(1, 1), (2, 1), (3, 2), (8, 4)])
def test_half_of_the_slots_are_written_at_once(snapshots, most):
    rig = StateRig(snapshots=snapshots, num_blocks=40)
    requests = [rig.add(range(20 * i, 20 * i + 6), max_tokens=1) for i in range(5)]
    step = rig.launch()
    assert step is not None
    assert step.batch.counts == [4] * 5
    assert step.batch.state_saves == [(requests[i].req_index, i + 1) for i in range(most)]
    rig.collect()
    rig.finish_all()
    # The last of them have a state, the others none.
    again = [rig.run([*range(20 * i, 20 * i + 6), 7])[0] for i in range(most)]
    assert [one.num_cached_tokens for one in again] == [4] * most


def test_without_snapshots_there_are_no_prefixes():
    for changes in (dict(snapshots=0), dict(caching=False)):
        rig = StateRig(**changes)
        assert rig.scheduler.kv.states is None
        for _ in range(2):
            assert rig.run(range(9))[1] == [9]


def test_snapshots_are_of_states():
    with pytest.raises(ValueError, match="num_state_snapshots=2 without has_states: expected 0"):
        info(num_state_snapshots=2)


# --- from the next step on -------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_state_is_read_a_step_after_it_was_saved(depth):
    """Who has the same prefix waits for that step, and does not compute it once more."""
    rig = StateRig(num_blocks=60, pipeline_depth=depth)
    requests = [rig.add([*range(8), 50 + i], max_tokens=3) for i in range(3)]
    first, second = rig.launch(), None
    if depth == 2:
        second = rig.launch()
    rig.collect()
    second = second or rig.launch()
    assert first is not None
    assert second is not None
    assert (first.batch.counts, first.batch.state_loads) == ([8], [])
    ((_, saved),) = first.batch.state_saves
    assert second.batch.counts == [1, 1, 1]
    assert second.batch.state_loads == [(one.req_index, saved) for one in requests[1:]]
    assert first.newly_cached_snapshots == [rig.states.pool.blocks[saved]]
    rig.collect()
    rig.finish_all(*requests)


def test_a_burst_with_a_shared_prefix_computes_it_twice():
    rig = StateRig(num_blocks=120, max_num_batched_tokens=400, max_num_seqs=16)
    requests = [rig.add([*range(40), *[100 + i] * 6], max_tokens=2) for i in range(10)]
    shapes = [rig.step() for _ in range(3)]
    assert shapes[0] == {"r0": 44, "r1": 40}
    assert shapes[1] == {"r0": 2, "r1": 4} | {f"r{i}": 4 for i in range(2, 10)}
    rig.finish_all(*requests)


def test_requests_waiting_for_state_cost_a_step_nothing(monkeypatch):
    rig, asked = StateRig(num_blocks=60, max_num_seqs=4), []
    requests = [rig.add([*range(8), 50 + i], max_tokens=1) for i in range(40)]
    awaits_snapshot = StateSnapshots.awaits_snapshot
    monkeypatch.setattr(
        StateSnapshots,
        "awaits_snapshot",
        lambda self, one: asked.append(one) or awaits_snapshot(self, one),
    )
    assert rig.step() == {"r0": 8}
    assert len(asked) == 6
    rig.finish_all()
    assert [one.num_cached_tokens for one in requests] == [0] + [8] * 39
    rig.expect(*requests)


def test_the_state_of_an_output_waits_for_its_last_token():
    rig = StateRig(interval=4, pipeline_depth=2)
    first = rig.add(range(6), max_tokens=20)
    saves = []
    while not saves:
        rig.launch()
        if len(rig.in_flight) == 2:
            saves += rig.in_flight[1].batch.state_saves if first.num_output_tokens else []
            rig.collect()
    # Eight tokens are in the state, the eighth of which is in flight in the step before.
    assert (first.num_computed_tokens, len(first.token_ids)) == (8, 8)
    assert rig.states.pool.num_cached == 1
    rig.states.cache_saved_snapshots()
    assert rig.states.pool.num_cached == 2


# --- what voids them -------------------------------------------------------------------------


def test_a_state_of_an_aborted_request_is_given_back():
    rig = StateRig()
    one = rig.add(range(9))
    rig.step()
    assert rig.states.pool.num_free == 7
    rig.scheduler.finish(one, "abort")
    assert rig.run(range(9))[1] == [8, 1]
    assert (rig.states.pool.num_free, rig.states.pool.num_cached) == (8, 1)


def test_a_paused_request_goes_on_from_its_newest_state():
    rig = StateRig(interval=4, max_num_seqs=1, num_blocks=40)
    first = rig.add(range(6), max_tokens=20)
    for _ in range(12):
        rig.step()
    assert first.num_computed_tokens == 16
    rig.scheduler.pause(first)
    rig.scheduler._evict_slot(first)
    assert first.blocks == ()
    rig.run(range(50, 56), max_tokens=3)
    rig.scheduler.resume(first)
    assert rig.step() == {"r0": 1}
    rig.finish_all(first)


def test_repeated_pauses_recompute_at_most_a_block():
    """As with a reader that takes one token at a time: not all of its output so far."""
    rig = StateRig(max_num_seqs=1, num_blocks=40)
    first, counts = rig.add(range(6), max_tokens=40), []
    while not first.is_finished:
        had = len(first.token_ids)
        counts.append(sum(rig.step().values()))
        if len(first.token_ids) > had:
            rig.scheduler.pause(first)
            rig.scheduler._evict_slot(first)
            rig.scheduler.resume(first)
    rig.expect(first)
    assert max(counts) == 4
    assert sum(counts) <= 4 * len(first.token_ids)
    assert rig.states.pool.num_cached == 2


def test_resetting_the_cache_forgets_states():
    rig = StateRig(interval=4)
    rig.run(range(9))
    one = rig.add(range(9), max_tokens=2)
    rig.step()
    assert rig.scheduler.kv.reset_prefix_cache() is False
    assert rig.states.pool.num_cached == 1
    rig.scheduler.pause(one)
    rig.scheduler._evict_slot(one)
    assert rig.scheduler.kv.reset_prefix_cache() is True
    assert (rig.states.pool.num_cached, rig.states.pool.num_free) == (0, 8)
    rig.scheduler.resume(one)
    assert rig.step() == {"r1": 8}
    rig.finish_all(one)


async def test_an_engine_tells_of_its_states():
    limits = info(num_blocks=40, has_states=True, num_state_snapshots=5, state_bytes=300)
    device = Fake(limits, FakeExecutor(limits), FakeTokenizer(), FakeModelConfig())
    async with device.engine() as engine:
        metrics, shared = EngineMetrics(engine), list(range(16))
        usages = [(await engine.generate([*shared, i], max_tokens=2)).usage for i in range(3)]
        assert [usage.cached_tokens for usage in usages] == [0, 16, 16]
        stats = engine.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (51, 32)
        assert (stats.num_state_snapshots, stats.num_cached_states) == (5, 1)
        assert stats.state_snapshot_bytes == 1500
        assert samples(metrics)["asyncllm:cached_states",] == 1
        assert await engine.reset_prefix_cache()
        assert engine.stats().num_cached_states == 0
        usage = (await engine.generate([*shared, 9], max_tokens=2)).usage
        assert usage.cached_tokens == 0


# --- a plain model of what is found ----------------------------------------------------------


class PlainSnapshots:
    """Hits of requests that run one after the other, from prefixes as tuples alone."""

    def __init__(self, unit: int, capacity: int, interval: int):
        self.unit, self.capacity, self.interval = unit, capacity, interval
        self.keys: set[tuple[int, ...]] = set()  # prefixes whose KV is cached
        self.states: OrderedDict[tuple[int, ...], None] = OrderedDict()  # oldest first

    def longest(self, tokens, most, among):
        ends = range(most // self.unit * self.unit, 0, -self.unit)
        return next((end for end in ends if tokens[:end] in among), 0)

    def take(self) -> None:
        if len(self.states) == self.capacity:
            self.states.popitem(last=False)

    def run(self, tokens: tuple[int, ...], num_prompt: int) -> int:
        """Tokens found, of a request with ``tokens`` at its end."""
        shared = self.longest(tokens, num_prompt - 1, self.keys)
        cached = self.longest(tokens, shared, self.states)
        if cached:
            self.states.move_to_end(tokens[:cached])
        last = (num_prompt - 1) // self.unit * self.unit
        computed, newest = len(tokens) - 1, ()
        ends = [end for end in (shared, last) if cached < end <= last]
        ends += range(last + self.interval, computed + 1, self.interval)
        for end in dict.fromkeys(ends):
            if tokens[:end] in self.states:
                continue
            self.take()
            if end == computed:
                continue  # the request ends with that step
            self.states[tokens[:end]] = None
            if end > num_prompt:
                self.states.pop(newest, None)
                newest = tokens[:end]
        self.keys |= {tokens[:end] for end in range(self.unit, computed + 1, self.unit)}
        return cached


@pytest.mark.parametrize("seed", range(8))
def test_hits_equal_the_plain_model(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    unit, capacity = rng.choice([1, 2, 3]), rng.randint(2, 7)
    interval = unit * rng.randint(1, 3)
    rig = StateRig((unit, None), snapshots=capacity, interval=interval, num_blocks=4000)
    model = PlainSnapshots(unit, capacity, interval)
    former, total = [], 0
    for _ in range(40):
        begin = rng.choice(former[:4])[: rng.randint(0, 20)] if former else []
        prompt = [*begin, *(rng.randrange(3) for _ in range(rng.randint(1, 8)))]
        one, _ = rig.run(prompt, max_tokens=rng.randint(1, 9))
        found = model.run(tuple(one.token_ids), len(prompt))
        assert one.num_cached_tokens == found
        cached = {block.hash for block in rig.states.pool.blocks if block.hash}
        assert len(cached) <= len(model.states)
        former.append(one.token_ids)
        total += found
    assert total > 0


# --- mistakes that have to show --------------------------------------------------------------


def _scenario(depth: int) -> None:
    """Prompts that share prefixes, a step that fails, and others that go on from the outputs and
    from the middle of the prompts."""
    rig = StateRig(
        snapshots=20, interval=4, num_blocks=200, max_num_batched_tokens=60, pipeline_depth=depth
    )
    prompts = [[*range(11), *[40 + i] * 6] for i in range(4)]
    for round_ in range(3):
        requests = [rig.add(prompt, max_tokens=9) for prompt in prompts]
        for _ in range(depth):
            rig.launch()
        if round_ == 0:
            rig.executor.discard()
            rig.scheduler.roll_back_steps(rig.in_flight)
            rig.in_flight.clear()
        while rig.scheduler.has_work() or rig.in_flight:
            if len(rig.in_flight) == depth or rig.launch() is None:
                rig.collect()
            check_scheduler(rig.scheduler)
        rig.expect(*requests)
        prompts = [[*one.token_ids, 7, 8] for one in requests]
        if round_ == 1:
            prompts = [[*one.token_ids[:n], 9] for one in requests for n in (13, 18)]


def _neighbours(monkeypatch) -> None:
    """Another snapshot is loaded than the one that was found."""
    load = StateSnapshots.load
    monkeypatch.setattr(StateSnapshots, "load", lambda self, one: load(self, one) % 20 + 1)


def _kept(monkeypatch) -> None:
    """What the slot's last request left there is not replaced."""
    advance = FakeExecutor._advance_states

    def kept(self, batch):
        batch.state_loads.clear()
        return advance(self, batch)

    monkeypatch.setattr(FakeExecutor, "_advance_states", kept)


def _too_old(monkeypatch) -> None:
    """A state is of a block less than its hash says."""
    cache_snapshot = StateSnapshots._cache_snapshot

    def older(self, save):
        if save.num_tokens + self._common_block_size <= len(save.request.token_ids):
            save.num_tokens += self._common_block_size
        cache_snapshot(self, save)

    monkeypatch.setattr(StateSnapshots, "_cache_snapshot", older)


def _same_step(monkeypatch) -> None:
    """It can be found in the step that writes it."""
    save = StateSnapshots.save

    def at_once(self, request, published):
        found = save(self, request, published)
        if found is not None and request.num_computed_tokens <= len(request.token_ids):
            self._cache_snapshot(self._pending_snapshots[-1])
            self.pool.release((self._pending_snapshots.pop().block,))
            self._pending_keys.clear()
        return found

    monkeypatch.setattr(StateSnapshots, "save", at_once)


def _any_epoch(monkeypatch) -> None:
    """It counts though its request has started over, and its step has failed."""
    cache_saved_snapshots = StateSnapshots.cache_saved_snapshots

    def ignorant(self):
        for save in self._pending_snapshots:
            save.epoch = save.request.epoch
        cache_saved_snapshots(self)

    monkeypatch.setattr(StateSnapshots, "cache_saved_snapshots", ignorant)


def _early(monkeypatch) -> None:
    """The device saves before the step has run."""
    advance = FakeExecutor._advance_states

    def early(self, batch):
        saves, batch.state_saves = batch.state_saves, []
        for req_index, snapshot in saves:
            self._states[self.info.max_num_seqs - 1 + snapshot] = self._states[req_index]
        return advance(self, batch)

    monkeypatch.setattr(FakeExecutor, "_advance_states", early)


def _blocks_alone(monkeypatch) -> None:
    """A snapshot that was found already stays, though the step that wrote it has failed."""

    def uncache_blocks(self, blocks, snapshots):
        for block in blocks:
            self.pool.uncache_block(block)

    monkeypatch.setattr("asyncllm.core.kv_cache.KVCacheManager.uncache_blocks", uncache_blocks)


MISTAKES = [_neighbours, _kept, _too_old, _same_step, _any_epoch, _early]


@pytest.mark.parametrize(
    ("break_it", "depth"), [*itertools.product(MISTAKES, [1, 2]), (_blocks_alone, 2)]
)
def test_the_fake_device_notices(break_it, depth, monkeypatch):
    _scenario(depth)
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        _scenario(depth)


# --- everything at once ----------------------------------------------------------------------


class StateMachine(SchedulerMachine):
    """As SchedulerMachine, with snapshots of recurrent states, few of them, and windows."""

    @initialize(
        num_blocks=st.integers(3, 14),
        groups=st.sampled_from(
            [
                [(1, None)],
                [(2, None)],
                [(4, None)],
                [(2, None), (2, 4)],
                [(1, 3)],
                [(2, 3), (3, None)],
            ]
        ),
        pipeline_depth=st.integers(1, 2),
        snapshots=st.integers(1, 5),
        interval=st.integers(1, 6),
        **LIMITS,
    )
    def make(self, num_blocks, groups, **changes):
        num_blocks, longest = room_for(groups, num_blocks, changes["max_num_batched_tokens"])
        self.begin(StateRig(*groups, num_blocks=num_blocks, max_model_len=longest, **changes))


TestStateMachine, TestManyStates = quick_and_slow(StateMachine, 60)
