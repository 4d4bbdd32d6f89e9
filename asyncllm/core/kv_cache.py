"""KVCacheManager: the blocks that a request holds, and its hits in the prefix cache."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

from asyncllm.core.block_pool import Block, BlockPool
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.core.request import Request

NEVER = sys.maxsize


class FullAttentionGroup:
    """Block accounting of one KV group whose layers keep the KV of every token.

    Args:
        index: the group's number, which its blocks are hashed with: equal tokens have other KV
            in another group.
    """

    def __init__(self, spec: KVCacheSpec, index: int, pool: BlockPool) -> None:
        self.block_size = spec.block_size
        self.index = index
        self.pool = pool
        self._suffix = index.to_bytes(index > 0, "big")

    def find_prefix(self, request: Request, num_tokens: int) -> list[Block]:
        """The longest run of cached blocks that the first ``num_tokens`` tokens begin with."""
        found: list[Block] = []
        find, suffix = self.pool.find, self._suffix
        hashes = request.extend_hashes(self.block_size)
        for i in range(num_tokens // self.block_size):
            block = find(hashes[i] + suffix)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, request: Request, end: int, published: list[Block]) -> None:
        """Makes the blocks findable that are full with ``end`` tokens and were not before.
        Those that no other block's contents were equal to are added to ``published``."""
        blocks = request.blocks[self.index]
        hashes = request.extend_hashes(self.block_size)
        for i in range(request.num_published // self.block_size, end // self.block_size):
            if self.pool.publish(blocks[i], hashes[i] + self._suffix):
                published.append(blocks[i])


def block_ids(tables: Iterable[list[Block]]) -> tuple[list[int], ...]:
    return tuple([[block.block_id for block in blocks] for blocks in tables])


_GROUPS = {"full_attention": FullAttentionGroup}


class KVCacheManager:
    """Block tables of all KV groups over one pool.

    All groups draw from one pool, in which a block is a number of bytes; the tokens that it
    holds are the group's business, and its layout is the executor's.

    Args:
        num_blocks: blocks in all, the null block included.
        specs: the groups.
        enable_prefix_caching: publish full blocks and look prefixes up.

    Attributes:
        watermark: blocks that an admission beside running requests leaves free for them to
            grow into (vLLM's share of a hundredth), or it would be their first victim.
    """

    def __init__(
        self, num_blocks: int, specs: tuple[KVCacheSpec, ...], *, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.groups = [_GROUPS[spec.kind](spec, i, self.pool) for i, spec in enumerate(specs)]
        # A full block of any group ends at a multiple of it.
        every = math.gcd(*(spec.block_size for spec in specs))
        self._publish_every = every if enable_prefix_caching else NEVER
        self.watermark = max(1, self.pool.num_usable // 100)
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of all groups."""
        return sum(self._missing([[] for _ in self.groups], num_tokens))

    def _missing(self, tables: Sequence[list[Block]], num_tokens: int) -> list[int]:
        """Blocks per group that the tables lack to hold ``num_tokens``."""
        missing = []
        for group in self.groups:
            count = -(-num_tokens // group.block_size) - len(tables[group.index])
            missing.append(count if count > 0 else 0)
        return missing

    def find_prefix(self, request: Request) -> tuple[list[Block], ...]:
        """The longest cached prefix that all groups have, as blocks per group. It leaves at
        least one token to compute: a step without one yields no logits. No longer than the
        request may use: ``Request.max_cached_tokens``."""
        if not self.enable_prefix_caching:
            return tuple([] for _ in self.groups)
        length, agreed = request.max_cached_tokens, False
        found: list[list[Block]] = []
        while not agreed:
            found, agreed = [], True
            for group in self.groups:
                blocks = group.find_prefix(request, length)
                # Of the groups before this one, those that found more look again.
                agreed = agreed and (not found or len(blocks) * group.block_size == length)
                length = len(blocks) * group.block_size
                found.append(blocks)
        return tuple(found)

    def admit(
        self, request: Request, num_tokens: int, prefix: tuple[list[Block], ...], reserve: int = 0
    ) -> bool:
        """Gives a request without blocks the cached ``prefix`` and new blocks for the rest
        of ``num_tokens``. The whole sequence gets its blocks at once, so that a prompt admitted
        in chunks never has to preempt another to go on. False, with nothing taken, if they
        do not fit with ``reserve`` blocks to spare."""
        missing = self._missing(prefix, num_tokens)
        num_taken = sum(missing)
        for blocks in prefix:
            for block in blocks:
                num_taken += block.ref_count == 0
        if num_taken + reserve > self.pool.num_free:
            return False
        for blocks in prefix:
            for block in blocks:
                self.pool.touch(block)
        request.blocks = prefix
        request.num_computed_tokens = len(prefix[0]) * self.groups[0].block_size
        self._set_published(request, request.num_computed_tokens)
        self._append(request, missing)
        if request.first_scheduled_at is None:
            request.num_cached_tokens = request.num_computed_tokens
            if self.enable_prefix_caching and request.prompt_logprobs is None:
                self.num_queried_tokens += len(request.token_ids)
                self.num_hit_tokens += request.num_computed_tokens
        return True

    def grow(
        self, request: Request, num_tokens: int, reserve: int = 0
    ) -> tuple[list[int], ...] | None:
        """Block ids per group appended so that the tables hold ``num_tokens``; None if the
        pool has too few, with ``reserve`` blocks to spare."""
        missing = self._missing(request.blocks, num_tokens)
        total = sum(missing)
        if total and total + reserve > self.pool.num_free:
            return None
        return block_ids(self._append(request, missing))

    def _append(self, request: Request, counts: list[int]) -> list[list[Block]]:
        appended, num_slots = [], NEVER
        for group in self.groups:
            blocks = request.blocks[group.index]
            new = self.pool.allocate(counts[group.index])
            blocks += new
            appended.append(new)
            if len(blocks) * group.block_size < num_slots:
                num_slots = len(blocks) * group.block_size
        request.num_slots = num_slots
        return appended

    def publish(self, request: Request) -> list[Block]:
        """Makes the request's full blocks findable whose tokens are all known and whose KV
        is computed by steps launched or about to be. Returns those newly findable."""
        end, known = request.num_computed_tokens, len(request.token_ids)
        if end > known:
            end = known
        published: list[Block] = []
        if end < request.publish_at:
            return published
        for group in self.groups:
            group.publish(request, end, published)
        self._set_published(request, end)
        return published

    def _set_published(self, request: Request, num_tokens: int) -> None:
        request.num_published = num_tokens
        request.publish_at = (num_tokens // self._publish_every + 1) * self._publish_every

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request; their contents stay findable."""
        for blocks in request.blocks:
            self.pool.release(blocks)
        request.blocks = ()
        request.num_slots = request.num_computed_tokens = 0
        request.publish_at = NEVER

    def check_integrity(self, requests: list[Request]) -> None:
        """Raises AssertionError unless every block of the pool is accounted for, and every
        token computed has a place in each group."""
        self.pool.check_integrity([b for blocks in r.blocks for b in blocks] for r in requests)
        for request in requests:
            assert len(request.blocks) in (0, len(self.groups)), request
            assert bool(request.blocks) or request.num_computed_tokens == 0, request
            for group, blocks in zip(self.groups, request.blocks, strict=False):
                assert request.num_computed_tokens <= len(blocks) * group.block_size, request
                assert request.num_slots <= len(blocks) * group.block_size, request
