"""StateSnapshots: saved recurrent states of prefixes, from which other requests continue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncllm.core.block_hashes import HashedTokens
from asyncllm.core.block_pool import Block, BlockPool
from asyncllm.core.request import Request

TOKENS_BETWEEN_OUTPUT_SNAPSHOTS = 256
"""Number of output tokens between two snapshots."""


@dataclass(slots=True)
class _PendingSnapshot:
    """Snapshot that a launched step, or the step being scheduled, writes.

    Attributes:
        num_tokens: length of the prefix.
        newly_cached_snapshots: list of the snapshots to remove from the cache if the step fails.
    """

    block: Block
    request: Request
    epoch: int
    num_tokens: int
    newly_cached_snapshots: list[Block]


class StateSnapshots:
    """Snapshots of recurrent states, in a BlockPool of their own. A block is a slot for the states
    of all layers after a prefix, under the hash of the prefix's last KV block.

    The states at one position take as much memory as the KV of a thousand tokens or more, and serve
    only requests with exactly that prefix. So a request saves few of them (after Marconi, Pan et
    al. 2024, arXiv:2411.19379):

    - where the cached KV of its prompt ends, if no snapshot reaches that far: the second request
      with a prefix saves the state after the prefix, and later requests find it;
    - at the last full block of its prompt, before its last token;
    - every ``interval`` tokens of its output, and at the last full block of output that is computed
      anew. Only the newest of these is kept.

    A row ends at a snapshot, because the executor has the state at the row's end only. The executor
    saves the state after the step's forward pass. So a snapshot can be found from the next step on,
    once the last of its tokens is known, and only if the request's epoch has not changed.

    Args:
        num_snapshots: number of snapshots, not counting the states of running requests.
        block_sizes: block sizes of the KV groups; a prefix ends where a block of every group ends.
        interval: number of output tokens between two snapshots, rounded up to whole blocks.

    Attributes:
        pool: pool whose block i is the executor's snapshot i.
    """

    def __init__(
        self,
        num_snapshots: int,
        block_sizes: Sequence[int],
        interval: int = TOKENS_BETWEEN_OUTPUT_SNAPSHOTS,
    ) -> None:
        self.pool = BlockPool(num_snapshots + 1)
        self._block_size = block_sizes[0]
        self._common_block_size = math.lcm(*block_sizes)
        self._interval = -(-interval // self._common_block_size) * self._common_block_size
        self._pending_snapshots: list[_PendingSnapshot] = []
        self._pending_keys: set[bytes] = set()

    def _snapshot_key(self, tokens: HashedTokens, num_tokens: int) -> bytes:
        return tokens.extend_hashes(self._block_size)[num_tokens // self._block_size - 1]

    def _snapshot_lengths(self, num_tokens: int) -> range:
        """Prefix lengths, up to ``num_tokens``, that a snapshot may have; longest first."""
        size = self._common_block_size
        return range(num_tokens // size * size, 0, -size)

    def find(self, prompt: HashedTokens, num_tokens: int) -> int:
        """Length in tokens of the longest prefix within ``num_tokens`` that has a snapshot; else
        0."""
        if not self.pool.num_cached:
            return 0
        for end in self._snapshot_lengths(num_tokens):
            if self.pool.find(self._snapshot_key(prompt, end)) is not None:
                return end
        return 0

    def awaits_snapshot(self, request: Request) -> bool:
        """Whether a request should wait for a snapshot that the step being scheduled will save. The
        snapshot covers a longer prefix of the request than any snapshot that exists."""
        if not self._pending_keys:
            return False
        for end in self._snapshot_lengths(request.max_cached_tokens):
            key = self._snapshot_key(request, end)
            if key in self._pending_keys:
                return True
            if self.pool.find(key) is not None:
                return False
        return False

    def admit(self, request: Request) -> None:
        """Choose where to save the first snapshot of an admitted request, whose blocks and
        ``num_computed_tokens`` are set."""
        request.snapshot_at = self._next_snapshot_at(request)

    def load(self, request: Request) -> int:
        """Return the snapshot that an admitted request continues from, and mark it as most recently
        used. The same step may overwrite that snapshot: the executor loads before it saves."""
        block = self.pool.find(self._snapshot_key(request, request.num_computed_tokens))
        assert block is not None
        self.pool.touch(block)
        self.pool.release((block,))
        return block.block_id

    def save(self, request: Request, newly_cached_snapshots: list[Block]) -> int | None:
        """Snapshot to write for a request that reaches ``snapshot_at`` with the step being
        scheduled. None if the prefix has a snapshot already. None too if half of the slots are
        being written: a burst of prompts would otherwise evict the snapshot of their shared prefix.

        Args:
            newly_cached_snapshots: list to which the snapshot's block is appended as soon as it is
                in the prefix cache.
        """
        num_tokens = request.num_computed_tokens
        request.snapshot_at = self._next_snapshot_at(request)
        if 2 * len(self._pending_snapshots) >= self.pool.num_usable:
            return None
        if num_tokens <= len(request.token_ids):
            key = self._snapshot_key(request, num_tokens)
            if key in self._pending_keys or self.pool.find(key) is not None:
                return None
            self._pending_keys.add(key)
        (block,) = self.pool.allocate(1)
        self._pending_snapshots.append(
            _PendingSnapshot(block, request, request.epoch, num_tokens, newly_cached_snapshots)
        )
        return block.block_id

    def cache_saved_snapshots(self) -> None:
        """Let requests find the snapshots that earlier steps have saved. A snapshot whose last
        token is in flight stays pending; one of an outdated epoch is dropped."""
        if not self._pending_snapshots:
            return
        still_pending = []
        for snapshot in self._pending_snapshots:
            request = snapshot.request
            if request.epoch == snapshot.epoch:
                if len(request.token_ids) < snapshot.num_tokens:
                    still_pending.append(snapshot)
                    continue
                self._cache_snapshot(snapshot)
            self.pool.release((snapshot.block,))
        self._pending_snapshots = still_pending
        self._pending_keys.clear()

    def _cache_snapshot(self, snapshot: _PendingSnapshot) -> None:
        request, key = snapshot.request, self._snapshot_key(snapshot.request, snapshot.num_tokens)
        if not self.pool.cache_block(snapshot.block, key):
            return
        snapshot.newly_cached_snapshots.append(snapshot.block)
        if snapshot.num_tokens <= request.num_prompt_tokens:
            return
        if request.newest_output_snapshot is not None:
            block, old_key = request.newest_output_snapshot
            if block.hash == old_key:
                self.pool.uncache_block(block)
        request.newest_output_snapshot = snapshot.block, key

    def _next_snapshot_at(self, request: Request) -> int:
        """Number of tokens at the request's next snapshot. Recomputed output gets a snapshot at its
        end, because a request that was paused or preempted may be paused or preempted again."""
        computed = request.num_computed_tokens
        last = (request.num_prompt_tokens - 1) // self._common_block_size * self._common_block_size
        if computed < last:
            num_shared = request.num_shared_tokens
            return num_shared if computed < num_shared < last else last
        end = (len(request.token_ids) - 1) // self._common_block_size * self._common_block_size
        if computed < end:
            return end
        return last + ((computed - last) // self._interval + 1) * self._interval

    def reset(self) -> None:
        """Drop every snapshot; no step may be in flight."""
        for snapshot in self._pending_snapshots:
            self.pool.release((snapshot.block,))
        self._pending_snapshots.clear()
        self._pending_keys.clear()
        self.pool.reset_prefix_cache()
