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

from asyncllm.core.block_pool import NULL_BLOCK_ID, Block, BlockPool, FreeList
from tests.hypothesis_settings import quick_and_slow


def test_lru_order_and_lazy_eviction():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    assert [b.block_id for b in blocks] == [1, 2, 3, 4]
    for block in blocks[:3]:
        assert pool.publish(block, bytes([block.block_id]))
    pool.release(blocks)
    # The one without a hash is reused first, then the tail of the prefix before its head.
    assert [b.block_id for b in pool.allocate(2)] == [4, 3]
    assert pool.find(b"\x03") is None
    assert pool.find(b"\x01") is blocks[0]
    assert pool.num_free == 2


def test_hit_takes_a_block_out_of_the_middle_of_the_free_list():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.publish(block, bytes([block.block_id]))
    pool.release(blocks)
    found = pool.find(b"\x02")
    assert found is blocks[1]
    pool.touch(found)
    assert pool.num_free == 2
    assert {b.block_id for b in pool.allocate(2)} == {1, 3}
    pool.check_integrity([[blocks[1]], [blocks[0]], [blocks[2]]])


def test_allocating_too_many_takes_nothing():
    pool = BlockPool(3)
    with pytest.raises(IndexError, match="3 blocks wanted, 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity()


def test_misuse_is_noticed():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    with pytest.raises(ValueError, match="published already"):
        pool.publish(block, b"y")
    pool.release([block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_second_block_with_equal_contents_stays_unpublished():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.publish(first, b"x")
    assert not pool.publish(second, b"x")
    assert pool.find(b"x") is first
    pool.release([first, second])
    assert pool.allocate(1)[0] is second


def test_reset_forgets_only_when_no_request_holds_a_block():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    assert not pool.reset_prefix_cache()
    assert pool.find(b"x") is block
    pool.release([block])
    assert pool.reset_prefix_cache()
    assert pool.find(b"x") is None
    pool.check_integrity()


def test_free_list_refuses_what_would_corrupt_it():
    block, other = Block(1), Block(2)
    free = FreeList([block])
    for insert in (free.append, free.appendleft):
        with pytest.raises(ValueError, match="in the free list already"):
            insert(block)
    with pytest.raises(ValueError, match="not in the free list"):
        free.remove(other)
    assert free.popleft_n(1) == [block]
    # It may come back, and is refused anew once it has gone.
    free.append(block)
    free.remove(block)
    with pytest.raises(ValueError, match="not in the free list"):
        free.remove(block)
    with pytest.raises(IndexError, match="1 blocks asked of a free list of 0"):
        free.popleft_n(1)
    assert (free.count, list(free)) == (0, [])


def test_free_list_may_begin_empty():
    free = FreeList([])
    with pytest.raises(IndexError, match="1 blocks asked of a free list of 0"):
        free.popleft_n(1)
    block, other = Block(1), Block(2)
    free.appendleft(block)
    free.appendleft(other)
    assert list(free) == [other, block]


def test_unpublished_block_that_is_free_is_reused_first():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.publish(block, bytes([block.block_id]))
    pool.release(blocks)
    pool.unpublish(blocks[1])
    pool.check_integrity()
    assert pool.allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_counts():
    pool = BlockPool(4)
    assert (pool.num_usable, pool.num_free, pool.num_cached) == (3, 3, 0)
    block, other = pool.allocate(2)
    pool.publish(block, b"x")
    assert (pool.num_usable, pool.num_free, pool.num_cached) == (3, 1, 1)
    pool.touch(block)
    pool.release([block])
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.release([block, other])
    assert (pool.num_free, pool.num_cached) == (3, 1)


def test_null_block_is_never_handed_out():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    assert block.block_id != NULL_BLOCK_ID
    assert pool.num_free == 0


def test_unpublished_block_that_is_held_stays_held():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    pool.unpublish(block)
    assert pool.find(b"x") is None
    assert pool.publish(block, b"y")
    pool.check_integrity([[block]])


def leaks(pool, holders):
    holders.pop()


def is_held_by_one_more(pool, holders):
    holders.append([holders[0][0]])


def is_held_twice_by_one(pool, holders):
    holders[0].append(holders[0][0])


def is_held_though_null(pool, holders):
    pool.blocks[NULL_BLOCK_ID].ref_count = 1
    holders.append([pool.blocks[NULL_BLOCK_ID]])


def is_free_though_null(pool, holders):
    pool._free_list.append(pool.blocks[NULL_BLOCK_ID])


def is_free_though_held(pool, holders):
    pool._free_list.append(holders[0][0])


def is_miscounted(pool, holders):
    pool._free_list.count += 1


def has_another_hash(pool, holders):
    holders[0][0].hash = b"y"


def has_lost_its_hash(pool, holders):
    holders[0][0].hash = None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leaks, "0 requests hold it"),
        (is_held_by_one_more, "2 requests hold it"),
        (is_held_twice_by_one, "holds a block twice"),
        (is_held_though_null, "holds the null block"),
        (is_free_though_null, "the null block is free"),
        (is_free_though_held, "leaked"),
        (is_miscounted, "the free list is corrupt"),
        (has_another_hash, "cannot be found"),
        (has_lost_its_hash, "names another block"),
    ],
)
def test_check_integrity_notices_a_block_that(damage, message):
    pool = BlockPool(4)
    block, other = pool.allocate(2)
    pool.publish(block, b"x")
    holders = [[block], [other]]
    pool.check_integrity(holders)
    damage(pool, holders)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(holders)


class PoolMachine(RuleBasedStateMachine):
    """The model: an ordered list of free ids, reference counts, and a dict of hashes."""

    @initialize(size=st.integers(2, 9))
    def make(self, size):
        self.pool = BlockPool(size)
        self.free = list(range(1, size))
        self.hash_of: dict[int, bytes] = {}
        self.holders: list[list] = []

    def _drop_hash(self, block_id):
        self.hash_of.pop(block_id, None)

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, len(self.pool.blocks)))
        if count > len(self.free):
            with pytest.raises(IndexError):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        expected, self.free = self.free[:count], self.free[count:]
        assert [b.block_id for b in taken] == expected
        for block_id in expected:
            self._drop_hash(block_id)
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
        assert self.pool.publish(block, digest) is fresh
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
        self.pool.unpublish(self.pool.blocks[block_id])
        self._drop_hash(block_id)
        if block_id in self.free:
            self.free.remove(block_id)
            self.free.insert(0, block_id)

    @rule()
    def reset(self):
        assert self.pool.reset_prefix_cache() is (not self.holders)
        if not self.holders:
            for block in list(self.free):
                if block in self.hash_of:
                    self.free.remove(block)
            hashed = list(self.hash_of)
            # Unpublishing moves each to the head, in the order of publication.
            self.free = [*reversed(hashed), *self.free]
            self.hash_of.clear()

    @invariant()
    def agrees(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity(self.holders)
            assert [b.block_id for b in self.pool._free_list] == self.free
            assert self.pool.num_cached == len(self.hash_of)


TestPoolMachine, TestManyPools = quick_and_slow(PoolMachine, 200)
