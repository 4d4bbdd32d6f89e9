"""BlockPool against a plain model: lists and dictionaries, written to be obviously right."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from asyncllm.core.block_pool import NULL_BLOCK_ID, BlockPool
from tests.hypothesis_settings import quick_and_slow
from tests.integrity import check_block_pool


def test_lru_order_and_lazy_eviction():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    assert [b.block_id for b in blocks] == [1, 2, 3, 4]
    for block in blocks[:3]:
        assert pool.cache_block(block, bytes([block.block_id]))
    pool.release(blocks)
    # The one without a hash is reused first, then the tail of the prefix before its head.
    assert [b.block_id for b in pool.allocate(2)] == [4, 3]
    assert pool.find(b"\x03") is None
    assert pool.find(b"\x01") is blocks[0]
    assert pool.num_free == 2


def test_misuse_is_noticed():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.cache_block(block, b"x")
    with pytest.raises(ValueError, match="cached already"):
        pool.cache_block(block, b"y")
    pool.release([block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def hold_the_null_block(pool, holders):
    pool.blocks[NULL_BLOCK_ID].ref_count = 1
    holders.append([pool.blocks[NULL_BLOCK_ID]])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool, holders: holders.pop(), "0 requests hold it"),
        (lambda pool, holders: holders.append(holders[0][:1]), "2 requests hold it"),
        (lambda pool, holders: holders[0].append(holders[0][0]), "holds a block twice"),
        (hold_the_null_block, "holds the null block"),
        (
            lambda pool, _: pool._unhashed.append(pool.blocks[NULL_BLOCK_ID]),
            "the null block is free",
        ),
        (lambda pool, holders: pool._unhashed.append(holders[0][0]), "leaked"),
        (lambda _, holders: setattr(holders[0][0], "hash", b"y"), "cannot be found"),
        (lambda _, holders: setattr(holders[0][0], "hash", None), "names another block"),
    ],
)
def test_check_block_pool_notices_damage(damage, message):
    pool = BlockPool(4)
    block, other = pool.allocate(2)
    pool.cache_block(block, b"x")
    holders = [[block], [other]]
    check_block_pool(pool, holders)
    damage(pool, holders)
    with pytest.raises(AssertionError, match=message):
        check_block_pool(pool, holders)


class PoolMachine(RuleBasedStateMachine):
    """The model: an ordered list of free ids, reference counts, and a dict of hashes."""

    @initialize(size=st.integers(2, 9))
    def make(self, size):
        self.pool = BlockPool(size)
        self.free = list(range(1, size))
        self.hash_of: dict[int, bytes] = {}
        self.holders: list[list] = []

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, len(self.pool.blocks)))
        if count > len(self.free):
            with pytest.raises(
                IndexError, match=f"{count} blocks wanted, {len(self.free)} are free"
            ):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        expected, self.free = self.free[:count], self.free[count:]
        assert [b.block_id for b in taken] == expected
        for block_id in expected:
            self.hash_of.pop(block_id, None)
        if taken:
            self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        held = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(held)
        for block in reversed(held):
            if not any(block in other for other in self.holders):
                if block.block_id in self.hash_of:
                    self.free.append(block.block_id)
                else:
                    self.free.insert(0, block.block_id)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), digest=st.binary(min_size=1, max_size=1))
    def publish(self, data, digest):
        held = data.draw(st.sampled_from(self.holders))
        block = data.draw(st.sampled_from(held))
        if block.block_id in self.hash_of:
            return
        fresh = digest not in self.hash_of.values()
        assert self.pool.cache_block(block, digest) is fresh
        if fresh:
            self.hash_of[block.block_id] = digest

    @precondition(lambda self: self.hash_of)
    @rule(data=st.data())
    def hit(self, data):
        block_id, digest = data.draw(st.sampled_from(sorted(self.hash_of.items())))
        block = self.pool.find(digest)
        assert block is self.pool.blocks[block_id]
        self.pool.touch(block)
        if block_id in self.free:
            self.free.remove(block_id)
        self.holders.append([block])

    @precondition(lambda self: self.hash_of)
    @rule(data=st.data())
    def unpublish(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.hash_of)))
        self.pool.uncache_block(self.pool.blocks[block_id])
        self.hash_of.pop(block_id, None)
        if block_id in self.free:
            self.free.remove(block_id)
            self.free.insert(0, block_id)

    @rule()
    def reset(self):
        assert self.pool.reset_prefix_cache() is (not self.holders)
        if not self.holders:
            # Unpublishing moves each to the head, in the order of publication.
            others = [block for block in self.free if block not in self.hash_of]
            self.free = [*reversed(self.hash_of), *others]
            self.hash_of.clear()

    @invariant()
    def agrees(self):
        if hasattr(self, "pool"):
            check_block_pool(self.pool, self.holders)
            free = [*reversed(self.pool._unhashed), *self.pool._evictable]
            assert [block.block_id for block in free] == self.free
            counts = self.pool.num_usable, self.pool.num_free, self.pool.num_cached
            assert counts == (len(self.pool.blocks) - 1, len(self.free), len(self.hash_of))


TestPoolMachine, TestManyPools = quick_and_slow(PoolMachine, 200)
