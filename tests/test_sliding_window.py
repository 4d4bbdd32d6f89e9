"""KV groups with a window: allocation, freeing and hits."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from asyncllm.core.batch import StepResult
from asyncllm.core.kv_cache import KVCacheManager, SlidingWindowGroup
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.core.scheduler import Scheduler
from tests.hypothesis_settings import quick_and_slow
from tests.integrity import check_kv_cache
from tests.kv_requests import ids, request
from tests.scheduler_machine import DEPTHS, LIMITS, SchedulerMachine, room_for
from tests.scheduler_rig import Rig, group, info

GROUPS = [
    [(2, 3)],
    [(1, 1)],
    [(4, 5)],
    [(3, 4)],
    [(2, None), (2, 4)],
    [(4, 2), (2, None)],
    [(4, 6), (2, 3)],
    [(2, None), (2, 4), (4, 7)],
    [(1, None), (3, 7), (3, 7)],
]
"""Block size and window of each group."""


def manager(*groups: tuple[int, int | None], num_blocks=41, step_tokens=8, **options):
    specs = tuple(group(i, *one) for i, one in enumerate(groups))
    return KVCacheManager(num_blocks, specs, step_tokens=step_tokens, **options)


def rig(*groups: tuple[int, int | None], **changes) -> Rig:
    sizes, windows = zip(*groups, strict=True)
    return Rig(block_size=sizes, windows=windows, **changes)


def test_a_window_has_at_least_one_key():
    with pytest.raises(ValueError, match="window=0: expected at least 1, or None"):
        KVCacheSpec((0,), 4, 0)


def test_most_blocks_assume_the_worst_window_alignment():
    for block_size, window, step in itertools.product((1, 2, 3, 4, 8), (1, 2, 5, 9), (1, 2, 7)):
        spec = KVCacheSpec((0,), block_size, window)
        for num_tokens in (1, 6, 40):
            touched = [
                len({at // block_size for at in range(max(0, first - window + 1), first + count)})
                for first in range(num_tokens)
                for count in range(1, min(step, num_tokens - first) + 1)
            ]
            assert spec.max_blocks(num_tokens, step) >= max(touched)
            if num_tokens == 40:
                assert spec.max_blocks(num_tokens, step) == max(touched)
        assert spec.max_blocks(10**9, step) == spec.max_blocks(40, step)


@pytest.mark.parametrize(("block_size", "window"), [(4, 1), (4, 2), (4, 5), (4, 6), (3, 7), (1, 2)])
def test_block_is_freed_once_wholly_before_window(block_size, window):
    kv = manager((block_size, window), step_tokens=40)
    one = request(range(40))
    assert kv.admit(one, 40, ([],))
    held = ids(one)[0]
    for computed in range(1, 41):
        one.num_computed_tokens = computed
        kv.cache_blocks(one)
        free, freed = kv.pool.num_free, kv.free_out_of_window(one)
        gone = [i for i in range(len(held)) if (i + 1) * block_size <= computed - window + 1]
        assert ids(one)[0] == [0 if i in gone else block for i, block in enumerate(held)]
        assert sum(end - first for _, first, end in freed) == kv.pool.num_free - free
        assert kv.free_out_of_window(one) == []
        check_kv_cache(kv, [one])
    # What was given back can be found all the same.
    assert kv.pool.num_cached == 40 // block_size
    kv.free(one)
    assert kv.pool.num_free == kv.pool.num_usable
    check_kv_cache(kv, [])


@pytest.mark.parametrize("seed", range(12))
def test_hit_is_the_longest_usable_by_all_groups(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    groups = rng.choice(GROUPS)
    kv = manager(*groups, num_blocks=200, step_tokens=60)
    one = request(range(48))
    assert kv.admit(one, 48, tuple([] for _ in groups))
    one.num_computed_tokens = 48
    kv.cache_blocks(one)
    blocks = one.blocks
    for lost in rng.sample([b for table in blocks for b in table], k=rng.choice([0, 2, 5, 9])):
        kv.pool.uncache_block(lost)

    def serves(length: int) -> bool:
        """Every key that the query behind ``length`` tokens sees is in a cached block."""
        for (size, window), table in zip(groups, blocks, strict=True):
            first = 0 if window is None else max(0, length - window + 1)
            if length % size or any(table[at // size].hash is None for at in range(first, length)):
                return False
        return True

    for num_tokens in range(1, 49):
        other = request(range(num_tokens))
        found = kv.find_prefix(other)
        longest = max(length for length in range(num_tokens) if serves(length))
        for (size, window), table, source in zip(groups, found, blocks, strict=True):
            first = 0 if window is None else max(0, longest - window + 1) // size
            expected = [0] * first + [b.block_id for b in source[first : longest // size]]
            assert [b.block_id for b in table] == expected
        assert kv.admit(other, num_tokens, found)
        assert other.num_computed_tokens == longest
        check_kv_cache(kv, [one, other])
        kv.free(other)


def test_admission_takes_blocks_of_a_full_window():
    # 4 blocks for 1 + 8 tokens of a window, wherever they begin, and 25 for all 50.
    kv = manager((2, None), (3, 4), num_blocks=31)
    one = request(range(50))
    assert kv.max_blocks_for(50) == 25 + 5
    assert kv.admit(one, 50, ([], []))
    assert [len(table) for table in ids(one)] == [25, 5]
    assert kv.pool.num_free == 0
    # A step takes what the one before has left behind.
    for computed in range(8, 50, 7):
        one.num_computed_tokens = computed
        kv.free_out_of_window(one)
        assert kv.grow(one, min(computed + 8, 50)) is not None
        assert len(one.blocks[1]) * 3 >= min(computed + 8, 50)
        check_kv_cache(kv, [one])


def test_admitted_prompt_never_preempts_others():
    one = rig((4, None), (4, 10), num_blocks=61, max_model_len=120, max_num_batched_tokens=12)
    requests = [one.add(range(100 * i, 100 * i + 60), max_tokens=3) for i in range(4)]
    while one.scheduler.has_work():
        one.step()
        if all(r.num_computed_tokens < r.num_prompt_tokens for r in one.scheduler.running):
            assert one.scheduler.num_preemptions == 0
    for each in requests:
        one.expect(each)


def most_blocks(window: int | None, num_tokens: int, **changes) -> tuple[int, int]:
    """Blocks of 64 tokens that a request of six groups, one of them full, holds at most and at its
    end, counted without a device."""
    limits = info(
        (64,) * 6,
        (None, *[window] * 5),
        num_blocks=6 * num_tokens // 64 + 1,
        max_model_len=num_tokens,
        **changes,
    )
    one, held = Rig(), []
    one.info, one.scheduler = limits, Scheduler(limits)
    one.add(range(num_tokens - 40), max_tokens=40)
    scheduler = one.scheduler
    while (step := scheduler.schedule()) is not None:
        held.append(scheduler.kv.pool.num_usable - scheduler.kv.pool.num_free)
        counts = [int(samples) for samples in step.batch.samples]
        list(scheduler.update(step, StepResult(step.batch.step, [5] * sum(counts), counts)))
    return max(held), held[-1]


def test_window_layers_take_a_quarter_of_the_memory():
    """Gemma 3's layers, five with a window of 1024 to one without, at 32k tokens. A block has the
    same bytes in either engine: 64 tokens in a sixth of the layers."""
    changes = dict(max_num_batched_tokens=2048)
    full = most_blocks(None, 32768, **changes)
    assert full == (6 * 512, 6 * 512)
    most, last = most_blocks(1024, 32768, **changes)
    assert (most, last) == (512 + 5 * 49, 512 + 5 * 17)
    assert 4 * most <= full[0]
    assert 5 * last < full[0]


def test_waiting_request_frees_blocks_out_of_window():
    """It paused in the middle of its prompt; what it takes up again fits where it just fitted."""
    one = rig((2, 5), num_blocks=9, max_model_len=60, max_num_batched_tokens=8)
    first = one.add(range(40), max_tokens=4)
    for _ in range(3):
        one.step()
    one.scheduler.pause(first)
    assert first.num_computed_tokens == 24
    one.scheduler.resume(first)
    one.finish_all()
    assert one.scheduler.num_preemptions == 0
    one.expect(first)


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_of_one_prompt_share_its_last_window(depth):
    one = rig((4, None), (4, 6), num_blocks=60, pipeline_depth=depth)
    members = [one.add(range(21), max_tokens=9) for _ in range(3)]
    for member in members[1:]:
        member.first_member = members[0]
    one.step()
    assert [member.num_cached_tokens for member in members] == [0, 20, 20]
    assert [[block.ref_count for block in member.blocks[1][3:5]] for member in members] == [
        [3, 3]
    ] * 3
    one.finish_all()
    for member in members:
        one.expect(member)


def _finish(one: Rig) -> None:
    requests = [one.add(range(20 * i, 20 * i + 23), max_tokens=20) for i in range(3)]
    one.finish_all()
    again = [one.add([*range(20 * i, 20 * i + 23), 7], max_tokens=5) for i in range(3)]
    one.finish_all()
    for each in requests + again:
        one.expect(each)


def _run(groups, depth) -> None:
    one = rig(*groups, num_blocks=200, max_num_batched_tokens=9, pipeline_depth=depth)
    _finish(one)


def _fewer(monkeypatch, name: str) -> None:
    make = SlidingWindowGroup.__init__

    def fewer(self, *args):
        make(self, *args)
        setattr(self, name, getattr(self, name) - 1)

    monkeypatch.setattr(SlidingWindowGroup, "__init__", fewer)


def _narrow(monkeypatch) -> None:
    """The window has a key less than its layers look at."""
    _fewer(monkeypatch, "window")


def _early(monkeypatch) -> None:
    """Blocks are given back by the step that still reads them."""
    free = KVCacheManager.free_out_of_window

    def early(self, request):
        request.num_computed_tokens += 1
        freed = free(self, request)
        request.num_computed_tokens -= 1
        return freed

    monkeypatch.setattr(KVCacheManager, "free_out_of_window", early)


def _short_hit(monkeypatch) -> None:
    """A hit needs a block less than the next query sees."""
    _fewer(monkeypatch, "_num_visible_blocks")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [[(2, 3)], [(4, None), (2, 5)], [(1, 2), (4, 5)]])
@pytest.mark.parametrize("break_it", [_narrow, _early, _short_hit])
def test_the_fake_device_notices(break_it, groups, depth, monkeypatch):
    _run(groups, depth)
    break_it(monkeypatch)
    with pytest.raises((RuntimeError, AssertionError)):
        _run(groups, depth)


class WindowMachine(SchedulerMachine):
    """As SchedulerMachine, with groups that have windows."""

    @initialize(
        num_blocks=st.integers(2, 14),
        groups=st.sampled_from(GROUPS),
        depth=DEPTHS,
        caching=st.booleans(),
        **LIMITS,
    )
    def make(self, num_blocks, groups, depth, **changes):
        step_tokens = changes["max_num_batched_tokens"] + depth["max_tokens_per_row"] - 1
        num_blocks, longest = room_for(groups, num_blocks, step_tokens)
        changes |= depth | {"num_blocks": num_blocks, "max_model_len": longest}
        self.begin(rig(*groups, **changes))


TestWindowMachine, TestManyWindows = quick_and_slow(WindowMachine, 80)
