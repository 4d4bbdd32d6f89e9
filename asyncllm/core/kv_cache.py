"""KVCacheManager: block tables of requests, and look-ups in the prefix cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from asyncllm.core.block_hashes import HashedTokens, partial_block_hash
from asyncllm.core.block_pool import Block, BlockPool
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.core.request import UNREACHABLE_NUM_TOKENS, Request
from asyncllm.core.state_snapshots import StateSnapshots

FreedEntries = tuple[int, int, int]
"""Range of freed block table entries, ``first`` to ``end - 1``, of a KV group: ``(KV group, first,
end)``."""


class FullAttentionGroup:
    """Block accounting of one KV group whose layers keep the KV of every token.

    Args:
        index: the group's number, a part of its block hashes: equal tokens have different KV in
            each group.
    """

    def __init__(self, spec: KVCacheSpec, index: int, pool: BlockPool, step_tokens: int) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.index = index
        self.pool = pool
        self._hash_suffix = index.to_bytes(index > 0, "big")

    def first_visible_block(self, num_computed_tokens: int) -> int:
        """Index of the first block table entry that the query at position ``num_computed_tokens``
        reads."""
        return 0

    def find_prefix(self, prompt: HashedTokens, num_tokens: int) -> list[Block]:
        """Longest cached prefix of the first ``num_tokens`` tokens, as entries of a block table."""
        suffix = self._hash_suffix
        hashes = prompt.extend_hashes(self.block_size)[: num_tokens // self.block_size]
        keys = (block_hash + suffix for block_hash in hashes) if suffix else hashes
        hit: list[Block] = []
        for block in map(self.pool.find, keys):
            if block is None:
                break
            hit.append(block)
        return hit

    def truncate_hit(self, prompt: HashedTokens, hit: list[Block], num_tokens: int) -> list[Block]:
        """Shorten ``hit``, a longer cached prefix, to at most ``num_tokens`` tokens."""
        return hit[: num_tokens // self.block_size]

    def cache_blocks(self, request: Request, end: int, newly_cached_blocks: list[Block]) -> None:
        """Cache the blocks that are full once ``end`` tokens are computed, for use as a prefix.
        Append to ``newly_cached_blocks`` those that were not cached yet.

        Blocks that have left a sliding window are skipped: they had no hash until their last tokens
        arrived, and by then they had been freed."""
        blocks = request.blocks[self.index]
        hashes = request.extend_hashes(self.block_size)
        first = request.num_tokens_in_prefix_cache // self.block_size
        for i in range(max(first, request.num_out_of_window[self.index]), end // self.block_size):
            if self.pool.cache_block(blocks[i], hashes[i] + self._hash_suffix):
                newly_cached_blocks.append(blocks[i])


class SlidingWindowGroup(FullAttentionGroup):
    """Block accounting of one KV group whose queries see the last ``window`` keys, their own
    included. Blocks that no later query sees are freed; the null block takes their place, so that
    entries of a table keep their positions."""

    def __init__(self, spec: KVCacheSpec, index: int, pool: BlockPool, step_tokens: int) -> None:
        super().__init__(spec, index, pool, step_tokens)
        assert spec.window is not None
        self.window = spec.window
        self.max_held_blocks = spec.max_blocks(UNREACHABLE_NUM_TOKENS, step_tokens)
        # The next query sees this many of a cached prefix's last blocks. A cached prefix ends with
        # a full block.
        self._num_visible_blocks = -(-(self.window - 1) // self.block_size)

    def first_visible_block(self, num_computed_tokens: int) -> int:
        first_key = num_computed_tokens - self.window + 1
        return first_key // self.block_size if first_key > 0 else 0

    def num_tokens_at_next_free(self, num_freed_blocks: int) -> int:
        """Number of computed tokens at which the next block leaves the window and is freed."""
        return (num_freed_blocks + 1) * self.block_size + self.window - 1

    def find_prefix(self, prompt: HashedTokens, num_tokens: int) -> list[Block]:
        """Longest prefix within ``num_tokens`` whose last blocks, those that the next query sees,
        are cached. Entries before those are the null block."""
        find, suffix, num_seen = self.pool.find, self._hash_suffix, self._num_visible_blocks
        hashes = prompt.extend_hashes(self.block_size)
        i = end = num_tokens // self.block_size
        seen: list[Block] = []
        while i and len(seen) < num_seen:
            i -= 1
            block = find(hashes[i] + suffix)
            if block is None:
                end = i
                seen.clear()
            else:
                seen.append(block)
        return [self.pool.null_block] * (end - len(seen)) + seen[::-1]

    def truncate_hit(self, prompt: HashedTokens, hit: list[Block], num_tokens: int) -> list[Block]:
        return self.find_prefix(prompt, num_tokens)


def block_ids(tables: Iterable[list[Block]]) -> tuple[list[int], ...]:
    return tuple([[block.block_id for block in blocks] for blocks in tables])


class KVCacheManager:
    """Block tables of all KV groups over one pool.

    All groups allocate from one pool, in which a block is a fixed number of bytes. How many tokens
    fit into a block depends on the group; the executor decides the block's layout.

    Args:
        num_blocks: blocks in all, the null block included.
        specs: the KV groups.
        step_tokens: maximum number of tokens that a step computes of one sequence, drafts included.
        enable_prefix_caching: enter full blocks into the prefix cache, and look prefixes up.
        num_state_snapshots: number of snapshots that the executor keeps of a recurrent model's
            states; 0 for other models.

    Attributes:
        watermark: blocks that stay free when a request is admitted beside running ones, so that
            their next step need not preempt it; 1 % of the pool, as in vLLM.
        states: snapshots of recurrent states, which a recurrent model needs to continue a cached
            prefix; None for other models, and without a prefix cache.
        block_copies: ``StepBatch.block_copies`` of the step that is being scheduled.
    """

    def __init__(
        self,
        num_blocks: int,
        specs: tuple[KVCacheSpec, ...],
        *,
        step_tokens: int,
        enable_prefix_caching: bool = True,
        num_state_snapshots: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.states: StateSnapshots | None = None
        if enable_prefix_caching and num_state_snapshots:
            sizes = [spec.block_size for spec in specs]
            self.states = StateSnapshots(num_state_snapshots, sizes)
        self.groups = [
            (FullAttentionGroup if spec.window is None else SlidingWindowGroup)(
                spec, i, self.pool, step_tokens
            )
            for i, spec in enumerate(specs)
        ]
        self._sliding_groups = [g for g in self.groups if isinstance(g, SlidingWindowGroup)]
        self._step_tokens = step_tokens
        self._caching_interval_tokens = UNREACHABLE_NUM_TOKENS
        if enable_prefix_caching:
            # Blocks become full only at multiples of the greatest common divisor of their sizes.
            self._caching_interval_tokens = math.gcd(*(spec.block_size for spec in specs))
        self.watermark = max(1, self.pool.num_usable // 100)
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.block_copies: list[tuple[int, int]] = []
        self._can_copy_blocks = (
            enable_prefix_caching and not num_state_snapshots and len(specs) == 1
        ) and not self._sliding_groups

    def max_blocks_for(self, num_tokens: int) -> int:
        """Maximum number of blocks, over all groups, that a sequence of ``num_tokens`` holds at
        once."""
        return sum(group.spec.max_blocks(num_tokens, self._step_tokens) for group in self.groups)

    def _num_missing_blocks(
        self, tables: Sequence[list[Block]], num_tokens: int, num_computed_tokens: int
    ) -> list[int]:
        """Number of blocks per group that the tables still lack to hold ``num_tokens``."""
        missing = []
        for group in self.groups:
            count = -(-num_tokens // group.block_size) - len(tables[group.index])
            missing.append(count if count > 0 else 0)
        for group in self._sliding_groups:
            # A table has null blocks before the window, then at most ``max_held_blocks`` others.
            max_entries = group.first_visible_block(num_computed_tokens) + group.max_held_blocks
            count = max_entries - len(tables[group.index])
            if count < missing[group.index]:
                missing[group.index] = count if count > 0 else 0
        return missing

    def find_prefix(self, request: Request) -> tuple[list[Block], ...]:
        """Longest prefix that all groups have cached, as a block table per group. The prefix has at
        most ``Request.max_cached_tokens``, so that at least one token is left to compute and sample
        from. With recurrent states, the prefix ends at a snapshot."""
        hit, request.num_shared_tokens = self._find_prefix(request)
        return tuple(hit)

    def num_cached_tokens(self, prompt: HashedTokens) -> int:
        """Length in tokens of the prefix that ``find_prefix`` finds. Changes nothing, not even the
        order of eviction.

        Any thread may call it while the engine thread runs: it only looks hashes up in dicts, and
        each look-up is atomic. If blocks come or go meanwhile, the length may match neither the
        earlier nor the later state. It is an estimate in any case, because eviction may follow."""
        hit, _ = self._find_prefix(prompt)
        return len(hit[0]) * self.groups[0].block_size

    def _find_prefix(self, prompt: HashedTokens) -> tuple[list[list[Block]], int]:
        """Longest prefix that all groups have cached and that ends at a snapshot, as block tables;
        and the number of tokens that would be cached if no snapshot were needed. Other threads may
        call it while blocks change: it only reads, and it terminates even if two look-ups see
        different states."""
        if not self.enable_prefix_caching:
            return [[] for _ in self.groups], 0
        length = prompt.max_cached_tokens
        hit: list[list[Block]] = []
        for group in self.groups:
            hit.append(group.find_prefix(prompt, length))
            length = len(hit[-1]) * group.block_size
        shared_length = length = self._shorten_to_common_prefix(prompt, hit, length)
        if self.states is not None:
            while (end := self.states.find(prompt, length)) < length:
                length = self._shorten_to_common_prefix(prompt, hit, end)
        return hit, shared_length

    def _shorten_to_common_prefix(
        self, prompt: HashedTokens, hit: list[list[Block]], length: int
    ) -> int:
        """Shorten the tables to the longest prefix within ``length`` tokens that all groups have
        cached; returns its length in tokens."""
        agreed = False
        while not agreed:
            agreed = True
            for i, group in enumerate(self.groups):
                if len(hit[i]) * group.block_size > length:
                    hit[i] = group.truncate_hit(prompt, hit[i], length)
                    length = len(hit[i]) * group.block_size
                    agreed = False
        return length

    def admit(
        self,
        request: Request,
        num_tokens: int,
        prefix: tuple[list[Block], ...],
        min_free_blocks: int = 0,
    ) -> bool:
        """Assign the cached ``prefix``, and new blocks up to ``num_tokens``, to a request without
        blocks. The blocks for the whole prompt are taken at once, so that later chunks of it need
        not preempt others. (With a sliding window they may preempt: a block outside of the window
        is not freed if another request shares it.) Returns False, and takes no block, if fewer than
        ``min_free_blocks`` blocks would be left."""
        num_computed_tokens = len(prefix[0]) * self.groups[0].block_size
        missing = self._num_missing_blocks(prefix, num_tokens, num_computed_tokens)
        num_taken = sum(missing)
        for blocks in prefix:
            for block in blocks:
                num_taken += block.ref_count == 0
        if num_taken + min_free_blocks > self.pool.num_free:
            return False
        request.num_out_of_window = [
            group.first_visible_block(num_computed_tokens) for group in self.groups
        ]
        for blocks, first in zip(prefix, request.num_out_of_window, strict=True):
            for block in blocks[first:]:
                self.pool.touch(block)
        request.blocks = prefix
        request.num_computed_tokens = num_computed_tokens
        self._set_num_tokens_in_prefix_cache(request, num_computed_tokens)
        if self.states is not None:
            self.states.admit(request)
        self._append_blocks(request, missing)
        if request.first_member is not None and self.copies_last_block(request):
            self._copy_last_block(request)
        if request.first_scheduled_at is None:
            request.num_cached_tokens = request.num_computed_tokens
            if self.enable_prefix_caching and request.prompt_logprobs is None:
                self.num_queried_tokens += len(request.token_ids)
                self.num_hit_tokens += request.num_computed_tokens
        return True

    # --- the last block of a prompt, for further outputs of it -------------------------

    def copies_last_block(self, request: Request) -> bool:
        """Whether an output that begins copies the last block of its prompt from another output.

        Outputs share full blocks alone, because each writes behind the prompt. Without the copy, a
        further output computes the tokens after the last full block again. Up to an eighth of a
        block is computed again: that takes less than the step for which the output would wait.
        """
        block_size = self.groups[0].block_size
        num_tokens = (request.num_prompt_tokens - 1) % block_size
        is_new = not request.num_output_tokens
        return self._can_copy_blocks and is_new and num_tokens > block_size // 8

    def cache_last_block(self, request: Request) -> None:
        """Index the last block of a computed prompt, so that the prompt's other outputs find it."""
        index, partial_hash = self._last_block(request)
        self.pool.cache_partial_block(request.blocks[0][index], partial_hash)

    def _last_block(self, request: Request) -> tuple[int, bytes]:
        """Index of the block that holds the token before the prompt's last one, and the hash of the
        block's tokens up to there."""
        block_size, end = self.groups[0].block_size, request.num_prompt_tokens - 1
        index = end // block_size
        hashes = request.extend_hashes(block_size)[:index]
        token_ids = request.token_ids[index * block_size : end]
        return index, partial_block_hash(hashes, token_ids, request.cache_salt)

    def _copy_last_block(self, request: Request) -> None:
        """Copy the prompt's last block from another output, if all before it is cached. Call it
        with the request's new blocks taken: they may have been the cached one."""
        index, partial_hash = self._last_block(request)
        source = self.pool.find(partial_hash)
        if source is None or request.num_computed_tokens < index * self.groups[0].block_size:
            return
        self.pool.touch(source)  # Make it the most recently used.
        self.pool.release([source])
        self.block_copies.append((source.block_id, request.blocks[0][index].block_id))
        request.num_computed_tokens = request.num_prompt_tokens - 1

    # --- blocks of running requests ----------------------------------------------------

    def free_out_of_window(self, request: Request) -> list[FreedEntries]:
        """Free the blocks that no later query sees; their contents stay cached. A step in flight
        may still read the blocks: steps run in order, so a later owner of a block writes after that
        step.

        Returns:
            The table entries that became the null block.
        """
        freed: list[FreedEntries] = []
        for group in self._sliding_groups:
            first = request.num_out_of_window[group.index]
            end = group.first_visible_block(request.num_computed_tokens)
            if first < end:
                blocks = request.blocks[group.index]
                self.pool.release(blocks[first:end])
                blocks[first:end] = [self.pool.null_block] * (end - first)
                request.num_out_of_window[group.index] = end
                freed.append((group.index, first, end))
        return freed

    def grow(
        self, request: Request, num_tokens: int, min_free_blocks: int = 0
    ) -> tuple[list[int], ...] | None:
        """Append blocks until the tables hold ``num_tokens``, or all known tokens if those are
        more. Call ``free_out_of_window`` first. Returns the new block ids per group; returns None,
        and takes no block, if fewer than ``min_free_blocks`` blocks would be left."""
        if num_tokens < len(request.token_ids):
            num_tokens = len(request.token_ids)
        missing = self._num_missing_blocks(request.blocks, num_tokens, request.num_computed_tokens)
        total = sum(missing)
        if total and total + min_free_blocks > self.pool.num_free:
            return None
        return block_ids(self._append_blocks(request, missing))

    def _append_blocks(self, request: Request, num_new_blocks: list[int]) -> list[list[Block]]:
        # End the row where the next state snapshot is due.
        new_blocks, num_covered_tokens = [], request.snapshot_at
        for group in self.groups:
            blocks = request.blocks[group.index]
            count = num_new_blocks[group.index]
            blocks_of_group = self.pool.allocate(count) if count else []
            blocks += blocks_of_group
            new_blocks.append(blocks_of_group)
            if len(blocks) * group.block_size < num_covered_tokens:
                num_covered_tokens = len(blocks) * group.block_size
        for group in self._sliding_groups:
            next_free_at = group.num_tokens_at_next_free(request.num_out_of_window[group.index])
            # Free a single block only when the tables grow anyway; otherwise the tables would
            # change twice as often.
            if next_free_at + group.block_size <= num_covered_tokens:
                num_covered_tokens = next_free_at
        request.num_covered_tokens = num_covered_tokens
        return new_blocks

    def cache_blocks(self, request: Request) -> list[Block]:
        """Enter full blocks into the prefix cache; returns those that were not cached yet. The
        tokens of a full block are known, and its KV is computed by launched steps or by the step
        being scheduled."""
        end, num_known = request.num_computed_tokens, len(request.token_ids)
        if end > num_known:
            end = num_known
        newly_cached_blocks: list[Block] = []
        if end < request.cache_blocks_at:
            return newly_cached_blocks
        for group in self.groups:
            group.cache_blocks(request, end, newly_cached_blocks)
        self._set_num_tokens_in_prefix_cache(request, end)
        return newly_cached_blocks

    def _set_num_tokens_in_prefix_cache(self, request: Request, num_tokens: int) -> None:
        request.num_tokens_in_prefix_cache = num_tokens
        interval = self._caching_interval_tokens
        request.cache_blocks_at = (num_tokens // interval + 1) * interval

    def uncache_blocks(self, blocks: list[Block], snapshots: list[Block]) -> None:
        """Remove from the prefix cache the blocks and snapshots of a step that failed."""
        for block in blocks:
            self.pool.uncache_block(block)
        for block in snapshots:
            assert self.states is not None
            self.states.pool.uncache_block(block)

    def uncache_request(self, request: Request) -> None:
        """Remove from the prefix cache the blocks that a failed request computed. They may contain
        NaN, which spreads in attention even where it is masked: zero times NaN is NaN."""
        for group, blocks in zip(self.groups, request.blocks, strict=False):
            for block in blocks[request.num_cached_tokens // group.block_size :]:
                self.pool.uncache_block(block)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Does nothing and returns False while requests hold blocks. No
        step may be in flight."""
        if not self.pool.reset_prefix_cache():
            return False
        if self.states is not None:
            self.states.reset()
        return True

    def free(self, request: Request) -> None:
        """Free all blocks of the request; their contents stay cached."""
        for blocks, first in zip(request.blocks, request.num_out_of_window, strict=False):
            self.pool.release(blocks[first:])
        request.blocks = ()
        request.num_covered_tokens = request.num_computed_tokens = 0
        request.cache_blocks_at = UNREACHABLE_NUM_TOKENS
