"""BlockTable: the KV blocks of every request in one KV group."""

from __future__ import annotations

import numpy as np

from asyncllm.core.block_pool import NULL_BLOCK_ID

EMPTY_INT64 = np.zeros(0, dtype=np.int64)


class BlockTable:
    """Table of block ids: one row per request index, as wide as the longest sequence.

    Args:
        tracks_changes: record changes for ``pop_changes``, with which a copy on the device is
            updated.

    Attributes:
        table: ``[max_num_seqs, blocks per sequence]`` int32.
        num_blocks: ``[max_num_seqs]``, number of entries in use in each row.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        *,
        tracks_changes: bool = False,
    ) -> None:
        self.block_size = block_size
        self.tracks_changes = tracks_changes
        width = -(-max_model_len // block_size)
        self.table = np.zeros((max_num_seqs, width), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._changes: list[np.ndarray] = []

    def append(self, req_index: int, block_ids: list[int]) -> None:
        start = int(self.num_blocks[req_index])
        end = start + len(block_ids)
        self.table[req_index, start:end] = block_ids
        self.num_blocks[req_index] = end
        if self.tracks_changes and block_ids:
            first = req_index * self.table.shape[1]
            self._changes.append(np.arange(first + start, first + end))

    def set_null_blocks(self, req_index: int, first_block: int, end_block: int) -> None:
        """Replaces a request's blocks from ``first_block`` up to ``end_block - 1`` by the null
        block."""
        self.table[req_index, first_block:end_block] = NULL_BLOCK_ID
        if self.tracks_changes:
            line = req_index * self.table.shape[1]
            self._changes.append(np.arange(line + first_block, line + end_block))

    def unfilled_blocks(self, req_index: int, first_block: int, num_tokens: int) -> np.ndarray:
        """Ids of the blocks, from entry ``first_block`` on, that a sequence of ``num_tokens``
        tokens does not fill."""
        first_block = max(first_block, num_tokens // self.block_size)
        return self.table[req_index, first_block : int(self.num_blocks[req_index])]

    def pop_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the changes since the last call.

        Returns:
            Indices into the flat table, int64, and their values, int32. An index that occurs twice
            has the same value both times.
        """
        if not self._changes:
            return EMPTY_INT64, EMPTY_INT64.astype(np.int32)
        indices = np.concatenate(self._changes)
        self._changes.clear()
        return indices, self.table.reshape(-1)[indices]

    def slot_mapping(self, req_indices: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """KV slots of T tokens, ``[T]`` int64.

        A token at position p of request r has the slot
        ``table[r][p // block_size] * block_size + p % block_size``.
        """
        blocks, offsets = np.divmod(positions, self.block_size)
        return self.table[req_indices, blocks] * np.int64(self.block_size) + offsets
