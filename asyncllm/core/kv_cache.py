"""KVCacheManager: which blocks a request holds, and what it finds in the prefix cache."""

from __future__ import annotations

from asyncllm.core.block_pool import Block, BlockPool
from asyncllm.core.request import Request


class KVCacheManager:
    """Block tables over one pool.

    Args:
        num_blocks: blocks in all, the null block included.
        block_size: tokens per block.
        enable_prefix_caching: publish full blocks and look prefixes up.

    Attributes:
        watermark: blocks that an admission beside running requests leaves free for them to
            grow into (vLLM's share of a hundredth), or it would be their first victim.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.watermark = max(1, self.pool.num_usable // 100)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[Block]:
        """The longest run of cached blocks that the request's tokens begin with, capped so
        that at least one token is left to compute: a step without one yields no logits."""
        if not self.enable_prefix_caching:
            return []
        found: list[Block] = []
        find = self.pool.find
        limit = (len(request.token_ids) - 1) // self.block_size
        hashes = request.extend_hashes(self.block_size)
        for i in range(limit):
            block = find(hashes[i])
            if block is None:
                break
            found.append(block)
        return found

    def admit(
        self, request: Request, num_tokens: int, prefix: list[Block], reserve: int = 0
    ) -> bool:
        """Gives a request without blocks the cached ``prefix`` and new blocks for the rest
        of ``num_tokens``. The whole sequence gets its blocks at once, so that a prompt admitted
        in chunks never has to preempt another to go on. False, with nothing taken, if they
        do not fit with ``reserve`` blocks to spare."""
        pool = self.pool
        num_new = self.blocks_for(num_tokens) - len(prefix)
        num_revived = sum(1 for block in prefix if block.ref_count == 0)
        if num_new + num_revived + reserve > pool.num_free:
            return False
        for block in prefix:
            pool.touch(block)
        request.blocks = prefix + pool.allocate(num_new)
        request.num_computed_tokens = len(prefix) * self.block_size
        request.num_published = len(prefix)
        if request.first_scheduled_at is None:
            request.num_cached_tokens = request.num_computed_tokens
            if self.enable_prefix_caching:
                self.num_queried_tokens += len(request.token_ids)
                self.num_hit_tokens += request.num_computed_tokens
        return True

    def grow(self, request: Request, num_tokens: int, reserve: int = 0) -> list[int] | None:
        """Block ids appended so that the table holds ``num_tokens``; None if the pool has
        too few, with ``reserve`` blocks to spare."""
        missing = self.blocks_for(num_tokens) - len(request.blocks)
        if missing <= 0:
            return []
        if missing + reserve > self.pool.num_free:
            return None
        blocks = self.pool.allocate(missing)
        request.blocks.extend(blocks)
        return [block.block_id for block in blocks]

    def publish(self, request: Request) -> list[Block]:
        """Makes the request's full blocks findable whose tokens are all known and whose KV
        is computed by steps launched or about to be. Returns those newly findable."""
        if not self.enable_prefix_caching:
            return []
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if num_full <= request.num_published:
            return []
        hashes = request.extend_hashes(self.block_size)
        published = []
        for i in range(request.num_published, num_full):
            block = request.blocks[i]
            if self.pool.publish(block, hashes[i]):
                published.append(block)
        request.num_published = num_full
        return published

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request; their contents stay findable."""
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed_tokens = 0
        request.num_published = 0
