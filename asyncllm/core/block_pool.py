"""BlockPool: all KV blocks, the free list and the index by hash.

The free list is intrusive and doubly linked, as in vLLM v1: popping the head, appending to the tail
and removing from the middle on a prefix hit are O(1). A freed block keeps its hash and its contents
and stays findable until it is popped for reuse, so eviction is lazy and least recently used. Blocks
without a hash are of no use to another request and go to the head. StateSnapshots uses a second
pool, whose blocks stand for recurrent states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK_ID = 0


class Block:
    """One KV block: its number, reference count, hash and place in the free list. Made once, with
    the pool; only the pool changes it."""

    __slots__ = ("block_id", "hash", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, hashed={self.hash is not None})"


class FreeList:
    """Intrusive doubly linked list of blocks, with a sentinel at both ends."""

    __slots__ = ("_head", "_tail", "count")

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next = self._tail
        self._tail.prev = self._head
        self.count = 0
        for block in blocks:
            self.append(block)

    def popleft_n(self, count: int) -> list[Block]:
        """Remove and return the first ``count`` blocks."""
        if count > self.count:
            raise IndexError(f"{count} blocks asked of a free list of {self.count}")
        taken = []
        block = self._head.next
        for _ in range(count):
            assert block is not None
            taken.append(block)
            successor = block.next
            block.prev = block.next = None
            block = successor
        assert block is not None
        self._head.next = block
        block.prev = self._head
        self.count -= count
        return taken

    def append(self, block: Block) -> None:
        self._insert_before(block, self._tail)

    def appendleft(self, block: Block) -> None:
        successor = self._head.next
        assert successor is not None
        self._insert_before(block, successor)

    def remove(self, block: Block) -> None:
        before, after = block.prev, block.next
        if before is None or after is None:
            raise ValueError(f"{block} is not in the free list")
        before.next = after
        after.prev = before
        block.prev = block.next = None
        self.count -= 1

    def _insert_before(self, block: Block, successor: Block) -> None:
        if block.prev is not None or block.next is not None:
            raise ValueError(f"{block} is in the free list already")
        before = successor.prev
        assert before is not None
        before.next = block
        block.prev = before
        block.next = successor
        successor.prev = block
        self.count += 1

    def __iter__(self):
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next


class BlockPool:
    """All blocks of one KV cache. Block 0 is the null block, which is never handed out: padding
    writes go there, and it replaces the freed blocks of a block table.

    Args:
        num_blocks: blocks in all, the null block included; at least 2.

    Attributes:
        find: returns the block with a hash, or None. It is the dict's own ``get``, because a prompt
        takes hundreds of look-ups.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs the null block and one more")
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.null_block.ref_count = 1
        self._free_list = FreeList(self.blocks[1:])
        self._by_hash: dict[bytes, Block] = {}
        self.find: Callable[[bytes], Block | None] = self._by_hash.get

    @property
    def num_usable(self) -> int:
        """Number of blocks that requests can hold."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds, cached or not."""
        return self._free_list.count

    @property
    def num_cached(self) -> int:
        """Number of blocks that can be found by their hash, held or free."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[Block]:
        """Take ``count`` blocks from the head of the free list, the least recently used. This
        evicts cached blocks; freeing a block does not.

        Raises:
            IndexError: if fewer blocks are free; then no block is taken.
        """
        if count > self._free_list.count:
            raise IndexError(f"{count} blocks wanted, {self._free_list.count} are free")
        taken = self._free_list.popleft_n(count)
        for block in taken:
            if block.hash is not None:
                self.unpublish(block)
            block.ref_count = 1
        return taken

    def touch(self, block: Block) -> None:
        """Take a reference to a block found by its hash. A free block leaves the free list."""
        if block.ref_count == 0:
            self._free_list.remove(block)
        block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Drop a reference to each of ``blocks``, given in order of position. They are freed from
        the last to the first: the tail of a prefix has to be evicted before its head, because a
        look-up finds the tail through the head."""
        for block in reversed(blocks):
            if block.ref_count <= 0:
                raise ValueError(f"{block} is released more often than it was taken")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.hash is None:
                    self._free_list.appendleft(block)
                else:
                    self._free_list.append(block)

    def publish(self, block: Block, block_hash: bytes) -> bool:
        """Enter a held block into the prefix cache. Returns False if another block already has this
        hash: the other block stays cached, and this block is reused first once it is free."""
        if block.hash is not None:
            raise ValueError(f"{block} is published already")
        if self._by_hash.setdefault(block_hash, block) is not block:
            return False
        block.hash = block_hash
        return True

    def unpublish(self, block: Block) -> None:
        """Remove a block from the prefix cache; a free block moves to the head of the free list."""
        if block.hash is None:
            return
        del self._by_hash[block.hash]
        block.hash = None
        if block.ref_count == 0 and block.prev is not None:
            self._free_list.remove(block)
            self._free_list.appendleft(block)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Does nothing and returns False while requests hold blocks."""
        if self.num_free != self.num_usable:
            return False
        for block in list(self._by_hash.values()):
            self.unpublish(block)
        return True

    def check_integrity(self, holders: Iterable[Sequence[Block]] = ()) -> None:
        """Raise AssertionError unless every block is accounted for.

        Args:
            holders: the block lists of all requests, to compare reference counts with.
        """
        refs: Counter[int] = Counter()
        for blocks in holders:
            ids = [block.block_id for block in blocks]
            assert len(ids) == len(set(ids)), f"a request holds a block twice: {ids}"
            refs.update(ids)
        free = list(self._free_list)
        free_ids = {block.block_id for block in free}
        assert len(free) == len(free_ids) == self._free_list.count, "the free list is corrupt"
        assert NULL_BLOCK_ID not in free_ids, "the null block is free"
        assert NULL_BLOCK_ID not in refs, "a request holds the null block"
        for block in self.blocks[1:]:
            expected = refs[block.block_id]
            assert block.ref_count == expected, f"{block}: {expected} requests hold it"
            assert (block.ref_count == 0) == (block.block_id in free_ids), f"{block} leaked"
            if block.hash is not None:
                assert self._by_hash.get(block.hash) is block, f"{block} cannot be found"
        assert all(b.hash == h for h, b in self._by_hash.items()), "a hash names another block"
