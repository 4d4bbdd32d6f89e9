"""KVCacheManager: admissions and hits, block by block."""

from __future__ import annotations

import pytest

from asyncllm.core.kv_cache import UNREACHABLE_NUM_TOKENS, KVCacheManager
from asyncllm.core.kv_cache_spec import KVCacheSpec
from tests.integrity import check_kv_cache
from tests.kv_requests import ids, request


def manager(num_blocks=11, sizes=(4,), **options):
    specs = tuple(KVCacheSpec((i,), size) for i, size in enumerate(sizes))
    return KVCacheManager(num_blocks, specs, step_tokens=8, **options)


def admitted(kv, token_ids, num_tokens=None):
    """A request whose whole prompt is computed and published."""
    one = request(token_ids)
    assert kv.admit(one, num_tokens or len(one.token_ids), kv.find_prefix(one))
    one.num_computed_tokens = len(one.token_ids)
    kv.cache_blocks(one)
    return one


@pytest.mark.parametrize(
    ("num_blocks", "watermark"), [(2, 1), (100, 1), (200, 1), (201, 2), (1000, 9), (1001, 10)]
)
def test_watermark_is_a_hundredth_and_at_least_a_block(num_blocks, watermark):
    assert manager(num_blocks).watermark == watermark


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(0, 0), (1, 2), (4, 3), (5, 5), (6, 5), (7, 6), (8, 6), (9, 8)]
)
def test_blocks_of_all_groups_are_counted(num_tokens, blocks):
    assert manager(sizes=(4, 2)).max_blocks_for(num_tokens) == blocks


def test_admission_takes_all_blocks_or_none():
    kv = manager(6)
    first = request(range(9))
    assert kv.admit(first, 9, ([],), 3) is False
    assert (kv.pool.num_free, first.blocks) == (5, ())
    assert kv.admit(first, 9, ([],), 2) is True
    assert ids(first) == [[1, 2, 3]]
    assert (first.num_covered_tokens, first.num_computed_tokens, first.cache_blocks_at) == (
        12,
        0,
        4,
    )
    second = request(range(20, 28))
    assert kv.admit(second, 9, ([],)) is False
    assert kv.admit(second, 8, ([],)) is True
    assert (ids(second), kv.pool.num_free) == ([[4, 5]], 0)
    check_kv_cache(kv, [first, second])


def test_a_hit_revives_free_blocks_and_shares_held_ones():
    kv = manager(6)
    first = admitted(kv, range(8))
    kv.free(first)
    second, third = request([*range(8), 50]), request([*range(8), 60])
    prefix = kv.find_prefix(second)
    assert [block.block_id for block in prefix[0]] == [1, 2]
    # Two that are revived and one that is new.
    assert kv.admit(second, 9, prefix, 3) is False
    assert all(block.ref_count == 0 for block in prefix[0])
    assert kv.admit(second, 9, prefix, 2) is True
    assert kv.pool.num_free == 2
    # And now the two are held already.
    assert kv.admit(third, 9, kv.find_prefix(third), 2) is False
    assert kv.admit(third, 9, kv.find_prefix(third), 1) is True
    assert [block.ref_count for block in prefix[0][:2]] == [2, 2]
    assert (
        third.num_computed_tokens,
        third.num_tokens_in_prefix_cache,
        third.num_covered_tokens,
    ) == (
        8,
        8,
        12,
    )
    check_kv_cache(kv, [second, third])


def test_hits_are_counted_once_per_request():
    kv = manager()
    kv.free(admitted(kv, range(8)))
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (8, 0)
    again = admitted(kv, range(10))
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (18, 8)
    assert again.num_cached_tokens == 8
    # Once it has run, it finds its own blocks, which is no hit.
    again.first_scheduled_at = 0.0
    kv.free(again)
    again.token_ids = list(range(5))
    assert kv.admit(again, 5, kv.find_prefix(again))
    assert again.num_computed_tokens == 4
    assert (again.num_cached_tokens, kv.num_queried_tokens, kv.num_hit_tokens) == (8, 18, 8)
    without = manager(enable_prefix_caching=False)
    without.free(admitted(without, range(8)))
    assert without.find_prefix(request(range(8))) == ([],)
    one = admitted(without, range(8))
    assert (one.num_cached_tokens, one.cache_blocks_at) == (0, UNREACHABLE_NUM_TOKENS)
    assert (without.num_queried_tokens, without.num_hit_tokens) == (0, 0)
    assert without.pool.num_cached == 0


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_a_hit_leaves_a_token_to_compute(num_tokens):
    kv = manager()
    kv.free(admitted(kv, range(12)))
    (found,) = kv.find_prefix(request(range(num_tokens)))
    assert len(found) == (num_tokens - 1) // 4
    assert [block.block_id for block in found] == [1, 2, 3][: len(found)]


def test_growing_appends_to_every_table_or_to_none():
    kv = manager(8, sizes=(4, 2))
    one = request(range(3))
    assert kv.admit(one, 3, ([], []))
    assert (ids(one), one.num_covered_tokens) == ([[1], [2, 3]], 4)
    assert kv.grow(one, 4, min_free_blocks=100) == ([], [])
    assert kv.grow(one, 5) == ([4], [5])
    assert (ids(one), one.num_covered_tokens) == ([[1, 4], [2, 3, 5]], 6)
    assert kv.grow(one, 7, min_free_blocks=2) is None
    assert (ids(one), one.num_covered_tokens, kv.pool.num_free) == ([[1, 4], [2, 3, 5]], 6, 2)
    assert kv.grow(one, 7, min_free_blocks=1) == ([], [6])
    assert one.num_covered_tokens == 8
    assert kv.grow(one, 12) is None
    check_kv_cache(kv, [one])


def test_blocks_are_published_as_they_become_full():
    kv = manager(sizes=(4, 2))
    one = request(range(9))
    kv.admit(one, 9, ([], []))
    assert one.cache_blocks_at == 2
    published = []
    for computed, cache_blocks_at in ((1, 2), (2, 4), (3, 4), (4, 6), (7, 8), (9, 10)):
        one.num_computed_tokens = computed
        published.append(len(kv.cache_blocks(one)))
        assert one.cache_blocks_at == cache_blocks_at
    assert published == [0, 1, 0, 2, 1, 2]
    # A token that is computed and not known yet is of no full block.
    one.num_computed_tokens = 10
    assert kv.cache_blocks(one) == []
    one.token_ids.append(9)
    assert len(kv.cache_blocks(one)) == 1
    assert kv.pool.num_cached == 7
    twin = request(one.token_ids)
    kv.admit(twin, 2, ([], []))
    twin.num_computed_tokens = 2
    # The contents are there already: offered, and not published.
    assert kv.cache_blocks(twin) == []
    assert (twin.num_tokens_in_prefix_cache, twin.cache_blocks_at) == (2, 4)


def test_freeing_keeps_blocks_in_prefix_cache():
    kv = manager()
    one = admitted(kv, range(9))
    kv.free(one)
    assert (one.blocks, one.num_covered_tokens, one.num_computed_tokens) == ((), 0, 0)
    assert one.cache_blocks_at == UNREACHABLE_NUM_TOKENS
    assert kv.pool.num_free == kv.pool.num_usable
    assert len(kv.find_prefix(request(range(9)))[0]) == 2
    check_kv_cache(kv, [one])


@pytest.mark.parametrize("damage", ["table", "computed", "beyond", "slots", "leak"])
def test_check_kv_cache_notices(damage):
    kv = manager(sizes=(4, 2))
    one, other = admitted(kv, range(5)), request(range(5))
    check_kv_cache(kv, [one, other])
    if damage == "table":
        kv.pool.release(one.blocks[1])
        one.blocks = one.blocks[:1]
    elif damage == "computed":
        other.num_computed_tokens = 1
    elif damage == "beyond":
        one.num_computed_tokens = 7
    elif damage == "slots":
        one.num_covered_tokens = 7
    else:
        one.blocks = ()
        one.num_computed_tokens = one.num_covered_tokens = 0
    with pytest.raises(AssertionError):
        check_kv_cache(kv, [one, other])
