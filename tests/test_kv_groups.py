"""Several KV groups through the scheduler."""

from __future__ import annotations

import pytest

from asyncllm.core import kv_cache, scheduler
from tests.scheduler_rig import Rig


@pytest.mark.parametrize("block_size", [(4, 4), (4, 8), (3, 5), (2, 4, 8)])
def test_every_group_has_a_table_of_its_own(block_size):
    rig = Rig(block_size=block_size, num_blocks=60)
    requests = [rig.add(range(10 * i, 10 * i + 9), max_tokens=9) for i in range(3)]
    rig.step()
    for request in requests:
        lengths = [len(blocks) for blocks in request.blocks]
        assert lengths == [-(-9 // size) for size in block_size]
    held = [b.block_id for r in requests for blocks in r.blocks for b in blocks]
    assert len(held) == len(set(held))
    rig.finish_all(*requests)
    assert rig.scheduler.kv.pool.num_free == 59


def test_a_wrong_group_is_a_wrong_output(monkeypatch):
    """What the tests with several groups stand on."""
    monkeypatch.setattr(scheduler, "block_ids", lambda tables: kv_cache.block_ids(tables)[:1] * 2)
    rig = Rig(block_size=(4, 4), num_blocks=60)
    request = rig.add(range(9), max_tokens=9)
    rig.finish_all()
    with pytest.raises(AssertionError):
        rig.expect(request)


@pytest.mark.parametrize(
    ("block_size", "cached"), [((4, 4), 24), ((4, 8), 24), ((4, 6), 24), ((5, 10), 20), ((5, 7), 0)]
)
def test_a_hit_ends_where_a_block_of_every_group_ends(block_size, cached):
    rig = Rig(block_size=block_size, num_blocks=60)
    first = rig.add(range(25), max_tokens=1)
    rig.step()
    assert first.is_finished
    second = rig.add([*range(25), 50], max_tokens=5)
    rig.step()
    assert second.num_cached_tokens == cached
    rig.finish_all(second)


@pytest.mark.parametrize("group", [0, 1])
def test_hit_is_the_shortest_of_all_groups(group):
    rig = Rig(block_size=(2, 4), num_blocks=60)
    first = rig.add(range(25), max_tokens=8)
    rig.step()
    lost = first.blocks[group][3]
    rig.finish_all()
    rig.scheduler.kv.pool.uncache_block(lost)
    second = rig.add(range(25), max_tokens=5)
    rig.step()
    # The block began at token 6 of the first group, whose hit of 6 the second has not, or at
    # token 12 of the second.
    assert second.num_cached_tokens == (4, 12)[group]
    rig.finish_all(second)


def test_groups_of_one_block_size_share_hashes_and_no_block():
    rig = Rig(block_size=(4, 4), num_blocks=60)
    request = rig.add(range(9), max_tokens=4)
    rig.step()
    assert list(request.block_hashes) == [4]
    assert rig.scheduler.kv.pool.num_cached == 4
    assert len({block.hash for blocks in request.blocks for block in blocks[:2]}) == 4


def test_admission_takes_nothing_unless_every_group_fits():
    rig = Rig(block_size=(4, 2), num_blocks=10)
    running = rig.add(range(8), max_tokens=4)
    rig.step()
    free = rig.scheduler.kv.pool.num_free
    waiting = rig.add(range(20, 26), max_tokens=2)
    rig.step()
    assert waiting.blocks == ()
    assert free == 3
    rig.finish_all(running, waiting)


def test_the_error_names_the_blocks_of_all_groups():
    rig = Rig(block_size=(4, 2), num_blocks=10, max_model_len=60)
    rig.add(range(40))
    rig.step()
    ((_, error),) = rig.scheduler.failed
    assert "needs 30 KV blocks for 40 tokens, the cache has 9" in str(error)
