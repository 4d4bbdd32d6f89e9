"""InputBatch: the persistent batch of requests on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncllm.core.batch import StepBatch
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.batch.block_table import EMPTY_INT64, BlockTable

PLACEHOLDER_TOKEN = -1


class InputBatch:
    """The persistent batch: arrays with one row per request index, to which steps apply changes.

    The arrays are as wide as the longest sequence. They are numpy zeros, which the operating
    system backs with memory only where they are touched, so that indices and positions that are
    never used cost nothing.

    Args:
        tracks_tables: record changes of the block tables, see BlockTable.

    Attributes:
        token_ids: ``[max_num_seqs, max_model_len + 1]`` int32, prompt and output. The runner
            writes sampled tokens here, so that the next step finds them whether the core has seen
            them or not; a token that an asynchronous device has not returned yet is
            PLACEHOLDER_TOKEN.
        epochs: ``[max_num_seqs]``, incremented whenever an index gets or loses a request: a token
            that was sampled in an earlier epoch is discarded.
        tables: a block table per KV group.
        num_prompt_tokens: ``[max_num_seqs]``.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        kv_groups: Sequence[KVCacheSpec],
        *,
        tracks_tables: bool = False,
    ) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.tables = [
            BlockTable(max_num_seqs, max_model_len, spec.block_size, tracks_changes=tracks_tables)
            for spec in kv_groups
        ]
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.epochs = np.zeros(max_num_seqs, dtype=np.int64)

    def apply_step_changes(self, batch: StepBatch) -> None:
        """Applies a step's changes: first released requests and freed blocks, then new ones."""
        for req_index in batch.released_indices:
            self.epochs[req_index] += 1
        for req_index, group, first, end in batch.freed_entries:
            self.tables[group].set_null_blocks(req_index, first, end)
        for assignment in batch.assignments:
            req_index = assignment.req_index
            tokens = np.asarray(assignment.token_ids, dtype=np.int32)
            self.token_ids[req_index, : len(tokens)] = tokens
            self.num_prompt_tokens[req_index] = assignment.num_prompt_tokens
            self.epochs[req_index] += 1
            for table, block_ids in zip(self.tables, assignment.block_ids, strict=True):
                table.num_blocks[req_index] = 0
                table.append(req_index, block_ids)
        for req_index, new_blocks in batch.new_blocks:
            for table, block_ids in zip(self.tables, new_blocks, strict=True):
                table.append(req_index, block_ids)

    def unfilled_blocks(self, batch: StepBatch) -> np.ndarray:
        """Ids of new blocks that a step does not fill, ``[n]`` int64.

        Attention that reads whole blocks would read the stale contents of such blocks.
        """
        row_of = dict(zip(batch.req_indices, range(len(batch)), strict=True))
        unfilled = [EMPTY_INT64]
        for assignment in batch.assignments:
            start, end = _token_span(batch, row_of.get(assignment.req_index))
            for table in self.tables:
                # Skip blocks before ``start``: they come from the prefix cache, and other requests
                # may read them.
                shared = -(-start // table.block_size)
                unfilled.append(table.unfilled_blocks(assignment.req_index, shared, end))
        for req_index, new_blocks in batch.new_blocks:
            _, end = _token_span(batch, row_of.get(req_index))
            for table, block_ids in zip(self.tables, new_blocks, strict=True):
                first = int(table.num_blocks[req_index]) - len(block_ids)
                unfilled.append(table.unfilled_blocks(req_index, first, end))
        return np.concatenate(unfilled).astype(np.int64)

    def output_token_ids(self, req_index: int, end: int) -> np.ndarray:
        """Output tokens before position ``end``: a view ``[n]`` int32."""
        return self.token_ids[req_index, self.num_prompt_tokens[req_index] : end]


def _token_span(batch: StepBatch, row: int | None) -> tuple[int, int]:
    """First position of a row's tokens, and the position after the last; (0, 0) without a row."""
    if row is None:
        return 0, 0
    return batch.starts[row], batch.starts[row] + batch.counts[row]
