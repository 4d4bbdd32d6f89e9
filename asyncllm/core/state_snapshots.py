"""StateSnapshots: recurrent states behind prefixes, for other requests to go on from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncllm.core.block_pool import Block, BlockPool
from asyncllm.core.request import Request

OUTPUT_INTERVAL = 256
"""Tokens of output from one snapshot to the next."""


@dataclass(slots=True)
class _Save:
    """A snapshot that a step writes which is launched or about to be.

    Attributes:
        num_tokens: of the prefix whose state it is.
        published: of that step: what is withdrawn if it fails.
    """

    block: Block
    request: Request
    epoch: int
    num_tokens: int
    published: list[Block]


class StateSnapshots:
    """Snapshots of recurrent states, in a BlockPool of their own: a block is a slot for the
    states of all layers behind a prefix, hashed as the prefix's last KV block is.

    The states behind one position take the memory of the KV of a thousand tokens and more, and are
    of no use to a request that has other tokens. So a request leaves few of them (after Marconi,
    Pan et al. 2024, arXiv:2411.19379):

    - where the KV groups had more of its tokens than there is a state for: the first request that
      shows a shared prefix saves its state, and the next ones find it;
    - at the last full block of its prompt, before its last token;
    - every ``interval`` tokens of its output, and at the last full block of output that is
      computed anew, of which the newest alone is kept.

    A row ends at a snapshot, because a state is that of the row's end. The executor saves it
    behind the step's forward pass, so that it counts from the next step on, if the request still
    has the epoch that it had, and once the last of its tokens is known.

    Args:
        num_snapshots: slots, beside those of running requests.
        block_sizes: of the KV groups: a prefix ends where a block of every group does.
        interval: tokens of output between two snapshots, rounded up to whole blocks.

    Attributes:
        pool: its block i is the executor's snapshot i.
    """

    def __init__(
        self, num_snapshots: int, block_sizes: Sequence[int], interval: int = OUTPUT_INTERVAL
    ) -> None:
        self.pool = BlockPool(num_snapshots + 1)
        self._block_size = block_sizes[0]
        self._unit = math.lcm(*block_sizes)
        self._interval = -(-interval // self._unit) * self._unit
        self._saves: list[_Save] = []
        self._saving: set[bytes] = set()

    def _key(self, request: Request, num_tokens: int) -> bytes:
        return request.extend_hashes(self._block_size)[num_tokens // self._block_size - 1]

    def find(self, request: Request, num_tokens: int) -> int:
        """Tokens of the longest prefix within ``num_tokens`` that has a snapshot; else 0."""
        if not self.pool.num_cached:
            return 0
        for end in range(num_tokens // self._unit * self._unit, 0, -self._unit):
            if self.pool.find(self._key(request, end)) is not None:
                return end
        return 0

    def is_saving(self, request: Request) -> bool:
        """Whether the step being scheduled saves a prefix of a waiting request, longer than any
        that has a snapshot: a step later the request need not compute it again."""
        if not self._saving:
            return False
        for end in range(request.max_cached_tokens // self._unit * self._unit, 0, -self._unit):
            key = self._key(request, end)
            if key in self._saving:
                return True
            if self.pool.find(key) is not None:
                return False
        return False

    def admit(self, request: Request) -> None:
        """A request has its blocks, and goes on behind ``num_computed_tokens``."""
        request.snapshot_at = self._next(request)

    def load(self, request: Request) -> int:
        """The snapshot that an admitted request goes on from; it is the most recently used from
        now on. A later step may write it: the executor loads before it saves."""
        block = self.pool.find(self._key(request, request.num_computed_tokens))
        assert block is not None
        self.pool.touch(block)
        self.pool.release((block,))
        return block.block_id

    def save(self, request: Request, published: list[Block]) -> int | None:
        """The snapshot for the state that a request has with the step being scheduled, with
        which it has come to ``snapshot_at``. None if there is one already, or if half of the
        slots are being written: a burst of prompts would push out the prefix that they share.

        Args:
            published: where the block is put once it is findable.
        """
        num_tokens = request.num_computed_tokens
        request.snapshot_at = self._next(request)
        if 2 * len(self._saves) >= self.pool.num_usable:
            return None
        if num_tokens <= len(request.token_ids):
            key = self._key(request, num_tokens)
            if key in self._saving or self.pool.find(key) is not None:
                return None
            self._saving.add(key)
        (block,) = self.pool.allocate(1)
        self._saves.append(_Save(block, request, request.epoch, num_tokens, published))
        return block.block_id

    def settle(self) -> None:
        """Makes findable what steps before the one to be scheduled have saved, but for those whose
        last token is still in flight. What was saved under another epoch is void."""
        if not self._saves:
            return
        waiting = []
        for save in self._saves:
            request = save.request
            if request.epoch == save.epoch:
                if len(request.token_ids) < save.num_tokens:
                    waiting.append(save)
                    continue
                self._publish(save)
            self.pool.release((save.block,))
        self._saves = waiting
        self._saving.clear()

    def _publish(self, save: _Save) -> None:
        request, key = save.request, self._key(save.request, save.num_tokens)
        if not self.pool.publish(save.block, key):
            return
        save.published.append(save.block)
        if save.num_tokens <= request.num_prompt_tokens:
            return
        if request.output_snapshot is not None:
            block, former = request.output_snapshot
            if block.hash == former:
                self.pool.unpublish(block)
        request.output_snapshot = save.block, key

    def _next(self, request: Request) -> int:
        """Tokens with which the request comes to its next snapshot. Output that is computed anew
        has one behind all of it: a request that was paused or preempted may be so again."""
        computed = request.num_computed_tokens
        last = (request.num_prompt_tokens - 1) // self._unit * self._unit
        if computed < last:
            shared = request.num_shared_tokens
            return shared if computed < shared < last else last
        known = (len(request.token_ids) - 1) // self._unit * self._unit
        if computed < known:
            return known
        return last + ((computed - last) // self._interval + 1) * self._interval

    def reset(self) -> None:
        """Forgets every snapshot; no step may be in flight."""
        for save in self._saves:
            self.pool.release((save.block,))
        self._saves.clear()
        self._saving.clear()
        self.pool.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every snapshot is free or being saved."""
        self.pool.check_integrity([[save.block] for save in self._saves])
