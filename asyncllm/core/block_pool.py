"""BlockPool: all KV blocks, the free list and the index by hash.

A freed block keeps its hash and its contents and stays findable until it is taken for reuse, so
eviction is lazy and least recently used. Blocks without a hash are of no use to another request and
are taken first. The free list is in two parts, a stack of blocks without a hash and an ordered dict
of those with one, so taking, freeing and removing a block on a prefix hit are O(1). StateSnapshots
uses a second pool, whose blocks stand for recurrent states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

NULL_BLOCK_ID = 0


class Block:
    """One KV block: its number, reference count and hashes. Made once, with the pool; only the pool
    changes it.

    Attributes:
        hash: hash of the full block, by which requests share it; None while it is not cached.
        partial_hash: hash of some of its first tokens, by which it is found to be copied; or None.
    """

    __slots__ = ("block_id", "hash", "partial_hash", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.partial_hash: bytes | None = None

    @property
    def is_cached(self) -> bool:
        return self.hash is not None or self.partial_hash is not None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, cached={self.is_cached})"


class BlockPool:
    """All blocks of one KV cache. Block 0 is the null block, which is never handed out: padding
    writes go there, and it replaces the freed blocks of a block table.

    Args:
        num_blocks: blocks in all, the null block included; at least 2.

    Attributes:
        find: function that returns the block with the given hash, or None. It is the dict's own
            ``get``, because a prompt takes hundreds of look-ups.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs the null block and one more")
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.null_block.ref_count = 1
        self._unhashed = self.blocks[:0:-1]
        self._evictable: OrderedDict[Block, None] = OrderedDict()
        self._by_hash: dict[bytes, Block] = {}
        self.find: Callable[[bytes], Block | None] = self._by_hash.get

    @property
    def num_usable(self) -> int:
        """Number of blocks that requests can hold."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds, cached or not."""
        return len(self._unhashed) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Number of hashes by which blocks can be found, held or free."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[Block]:
        """Take ``count`` free blocks: the latest freed of those without a hash, then the least
        recently used. This evicts cached blocks; freeing a block does not.

        Raises:
            IndexError: if fewer blocks are free; then no block is taken.
        """
        if count > self.num_free:
            raise IndexError(f"{count} blocks wanted, {self.num_free} are free")
        taken = []
        for _ in range(count):
            if not self._unhashed:
                self.uncache_block(next(iter(self._evictable)))
            block = self._unhashed.pop()
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, block: Block) -> None:
        """Take a reference to a block found by its hash. A free block leaves the free list."""
        if block.ref_count == 0:
            del self._evictable[block]
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
                if block.is_cached:
                    self._evictable[block] = None
                else:
                    self._unhashed.append(block)

    def cache_block(self, block: Block, block_hash: bytes) -> bool:
        """Enter a held block into the prefix cache. Returns False if another block already has this
        hash: the other block stays cached, and this block is reused first once it is free."""
        if block.hash is not None:
            raise ValueError(f"{block} is cached already")
        if self._by_hash.setdefault(block_hash, block) is not block:
            return False
        block.hash = block_hash
        return True

    def cache_partial_block(self, block: Block, partial_hash: bytes) -> None:
        """Index a held block by the hash of some of its first tokens, unless another block has this
        hash already."""
        if block.partial_hash is None and partial_hash not in self._by_hash:
            self._by_hash[partial_hash] = block
            block.partial_hash = partial_hash

    def uncache_block(self, block: Block) -> None:
        """Remove a block from the prefix cache. A free block is then the next to be allocated."""
        for block_hash in (block.hash, block.partial_hash):
            if block_hash is not None:
                del self._by_hash[block_hash]
        block.hash = block.partial_hash = None
        if block in self._evictable:
            del self._evictable[block]
            self._unhashed.append(block)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Does nothing and returns False while requests hold blocks."""
        if self.num_free != self.num_usable:
            return False
        for block in dict.fromkeys(self._by_hash.values()):
            self.uncache_block(block)
        return True
