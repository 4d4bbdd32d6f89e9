"""InputBatch: what the runner knows about each slot, and a step's index arithmetic."""

from __future__ import annotations

import numpy as np

from asyncllm.core.batch import RequestAssignment, StepBatch
from asyncllm.gpu.batch.step_inputs import HostInputs

UNKNOWN = -1

_NO_BLOCKS = np.zeros(0, dtype=np.int64)


class InputBatch:
    """The persistent batch: one row of each buffer per slot, updated by what changed.

    The buffers are as wide as the longest sequence. They are numpy zeros, which the
    operating system backs with memory only where they are touched, so slots and positions
    that are never used cost nothing.

    Args:
        tracks_table: changes of the block table are kept until they are taken.

    Attributes:
        token_ids: ``[max_num_seqs, max_model_len + 1]`` int32, prompt and output. A sampled
            token is written here by the runner, so that the next step finds it whether the
            core has seen it or not; until it has come from a device that runs ahead, it is
            UNKNOWN.
        epochs: ``[max_num_seqs]``, how many requests each slot has had: a token that was
            sampled for an earlier one is void.
        block_table: ``[max_num_seqs, blocks per sequence]`` int32.
        num_blocks: ``[max_num_seqs]``, entries of each block table in use.
        num_prompt_tokens: ``[max_num_seqs]``.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, *, tracks_table: bool = False
    ) -> None:
        self.block_size = block_size
        self.tracks_table = tracks_table
        width = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_table = np.zeros((max_num_seqs, width), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.epochs = np.zeros(max_num_seqs, dtype=np.int64)
        self._cells: list[np.ndarray] = []

    def apply(self, batch: StepBatch) -> np.ndarray:
        """Takes over what changed: releases, then assignments, then new blocks.

        Returns:
            Blocks that have a new owner and that this step will not fill to the end, int64.
            Their stale contents are read by attention that works on whole blocks.
        """
        for req_index in batch.released:
            self.num_blocks[req_index] = 0
            self.epochs[req_index] += 1
        if not batch.assignments and not batch.new_blocks:
            return _NO_BLOCKS
        rows = dict(
            zip(batch.req_indices, zip(batch.starts, batch.counts, strict=True), strict=True)
        )
        blocks_to_zero: list[np.ndarray] = []
        for assignment in batch.assignments:
            req_index = assignment.req_index
            start, count = rows.get(req_index, (0, 0))
            self._assign(assignment)
            # Blocks before ``start`` came from the prefix cache: they have other readers.
            shared = -(-start // self.block_size)
            blocks_to_zero.append(
                self._blocks_from(req_index, max(shared, (start + count) // self.block_size))
            )
        for req_index, (block_ids,) in batch.new_blocks:
            first = int(self.num_blocks[req_index])
            self._append_blocks(req_index, block_ids)
            start, count = rows.get(req_index, (0, 0))
            blocks_to_zero.append(
                self._blocks_from(req_index, max(first, (start + count) // self.block_size))
            )
        return np.concatenate(blocks_to_zero).astype(np.int64)

    def _assign(self, assignment: RequestAssignment) -> None:
        req_index = assignment.req_index
        tokens = np.asarray(assignment.token_ids, dtype=np.int32)
        self.token_ids[req_index, : len(tokens)] = tokens
        self.num_prompt_tokens[req_index] = assignment.num_prompt_tokens
        self.epochs[req_index] += 1
        self.num_blocks[req_index] = 0
        (block_ids,) = assignment.block_ids
        self._append_blocks(req_index, block_ids)

    def _append_blocks(self, req_index: int, block_ids: list[int]) -> None:
        start = int(self.num_blocks[req_index])
        end = start + len(block_ids)
        self.block_table[req_index, start:end] = block_ids
        self.num_blocks[req_index] = end
        if self.tracks_table and block_ids:
            first = req_index * self.block_table.shape[1]
            self._cells.append(np.arange(first + start, first + end))

    def _blocks_from(self, req_index: int, first: int) -> np.ndarray:
        return self.block_table[req_index, first : int(self.num_blocks[req_index])]

    def write_sampled(
        self, req_indices: np.ndarray, positions: np.ndarray, tokens: np.ndarray | int
    ) -> None:
        """Appends sampled tokens: each belongs at its position in its slot."""
        self.token_ids[req_indices, positions] = tokens

    def take_table_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """What changed in the block table since the last call.

        Returns:
            Entries of the flat table, int64, none twice, and what they are now, int32.
        """
        if not self._cells:
            return _NO_BLOCKS, _NO_BLOCKS.astype(np.int32)
        cells = self._cells[0] if len(self._cells) == 1 else np.unique(np.concatenate(self._cells))
        self._cells.clear()
        return cells, self.block_table.reshape(-1)[cells]

    def output_token_ids(self, req_index: int, end: int) -> np.ndarray:
        """Output tokens before position ``end``: a view ``[n]`` int32."""
        return self.token_ids[req_index, self.num_prompt_tokens[req_index] : end]

    def prepare(self, batch: StepBatch) -> HostInputs:
        """The step's rows. For token t of row r at position p the slot in the cache is
        ``block_table[r][p // block_size] * block_size + p % block_size``."""
        req_indices = np.array(batch.req_indices, dtype=np.int64)
        starts = np.array(batch.starts, dtype=np.int64)
        counts = np.array(batch.counts, dtype=np.int64)
        query_start_loc = np.zeros(len(req_indices) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        if batch.num_decodes == len(req_indices):
            token_slots, positions = req_indices, starts
        else:
            token_slots = np.repeat(req_indices, counts)
            positions = np.arange(query_start_loc[-1]) + np.repeat(
                starts - query_start_loc[:-1], counts
            )
        blocks, offsets = np.divmod(positions, self.block_size)
        slot_mapping = self.block_table[token_slots, blocks] * np.int64(self.block_size) + offsets
        logits_indices = None
        if batch.num_decodes != len(req_indices):
            logits_indices = query_start_loc[1:][np.array(batch.samples, dtype=bool)] - 1
        return HostInputs(
            num_decodes=batch.num_decodes,
            token_ids=self.token_ids[token_slots, positions].astype(np.int64),
            positions=positions,
            slot_mapping=slot_mapping,
            logits_indices=logits_indices,
            query_start_loc=query_start_loc,
            seq_lens=starts + counts,
            starts=starts,
            block_table=self.block_table[req_indices],
            block_size=self.block_size,
        )
