"""InputBatch: the persistent batch, and a step's index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import RequestAssignment, StepBatch
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.batch.block_table import NO_BLOCKS, BlockTable
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.h2d import copy_to_device

PLACEHOLDER_TOKEN = -1


class InputBatch:
    """The persistent batch: a line of each buffer per request index, updated by changes.

    The buffers are as wide as the longest sequence. They are numpy zeros, which the
    operating system backs with memory only where they are touched, so indices and positions
    that are never used cost nothing.

    Args:
        tracks_tables: changes of the block tables are kept until they are taken.

    Attributes:
        token_ids: ``[max_num_seqs, max_model_len + 1]`` int32, prompt and output. A sampled
            token is written here by the runner, so that the next step finds it whether the
            core has seen it or not; until it has come from an asynchronous device, it is
            PLACEHOLDER_TOKEN.
        epochs: ``[max_num_seqs]``, requests that each index has had: a token that was sampled
            for an earlier one is void.
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

    def apply(self, batch: StepBatch) -> np.ndarray:
        """Applies a step's changes: releases, blocks given back, assignments, then new blocks.

        Returns:
            Blocks that have a new owner and that this step will not fill to the end, int64.
            Attention on whole blocks reads their stale contents.
        """
        for req_index in batch.released:
            self.epochs[req_index] += 1
        for req_index, group, first, end in batch.trimmed:
            self.tables[group].trim(req_index, first, end)
        if not batch.assignments and not batch.new_blocks:
            return NO_BLOCKS
        row_of = dict(zip(batch.req_indices, range(len(batch)), strict=True))
        unfilled: list[np.ndarray] = []
        for assignment in batch.assignments:
            req_index = assignment.req_index
            start, end = _span(batch, row_of.get(req_index))
            self._assign(assignment)
            for table, block_ids in zip(self.tables, assignment.block_ids, strict=True):
                table.num_blocks[req_index] = 0
                table.append(req_index, block_ids)
                # Blocks before ``start`` came from the prefix cache: they have other readers.
                shared = -(-start // table.block_size)
                unfilled.append(table.unfilled(req_index, shared, end))
        for req_index, new_blocks in batch.new_blocks:
            _, end = _span(batch, row_of.get(req_index))
            for table, block_ids in zip(self.tables, new_blocks, strict=True):
                first = int(table.num_blocks[req_index])
                table.append(req_index, block_ids)
                unfilled.append(table.unfilled(req_index, first, end))
        return np.concatenate(unfilled).astype(np.int64)

    def _assign(self, assignment: RequestAssignment) -> None:
        req_index = assignment.req_index
        tokens = np.asarray(assignment.token_ids, dtype=np.int32)
        self.token_ids[req_index, : len(tokens)] = tokens
        self.num_prompt_tokens[req_index] = assignment.num_prompt_tokens
        self.epochs[req_index] += 1

    def output_token_ids(self, req_index: int, end: int) -> np.ndarray:
        """Output tokens before position ``end``: a view ``[n]`` int32."""
        return self.token_ids[req_index, self.num_prompt_tokens[req_index] : end]

    def prepare(
        self, batch: StepBatch, device: torch.device, device_tables: Sequence[Tensor] | None = None
    ) -> tuple[ModelInputs, ...]:
        """The step's inputs per KV group. Queues their copies to ``device``.

        Args:
            device_tables: per KV group, where the device has the block tables.
        """
        req_indices = np.array(batch.req_indices, dtype=np.int64)
        starts = np.array(batch.starts, dtype=np.int64)
        counts = np.array(batch.counts, dtype=np.int64)
        query_start_loc = np.zeros(len(req_indices) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        lines, positions, logits_indices = req_indices, starts, None
        if batch.num_decodes != len(req_indices):
            lines = np.repeat(req_indices, counts)
            positions = np.arange(query_start_loc[-1]) + np.repeat(
                starts - query_start_loc[:-1], counts
            )
            wanted = query_start_loc[1:][np.array(batch.samples, dtype=bool)] - 1
            if batch.prompt_logprobs:
                wanted = np.concatenate((wanted, *span_indices(batch, query_start_loc)))
            logits_indices = copy_to_device(wanted, device)
        token_ids = copy_to_device(self.token_ids[lines, positions].astype(np.int64), device)
        device_positions = copy_to_device(positions, device)
        device_req_indices = copy_to_device(req_indices, device)
        seq_lens = starts + counts
        return tuple(
            ModelInputs(
                num_decodes=batch.num_decodes,
                token_ids=token_ids,
                positions=device_positions,
                logits_indices=logits_indices,
                req_indices=device_req_indices,
                host_req_indices=req_indices,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                starts=starts,
                slot_mapping=copy_to_device(table.slot_mapping(lines, positions), device),
                host_table=table.table,
                device_table=None if device_tables is None else device_tables[group],
                block_size=table.block_size,
            )
            for group, table in enumerate(self.tables)
        )


def span_indices(batch: StepBatch, query_start_loc: np.ndarray) -> list[np.ndarray]:
    """The step's tokens at the positions of the spans that prompt log-probabilities are of."""
    return [
        np.arange(span.first, span.end) + (query_start_loc[row] - batch.starts[row])
        for row, span in batch.prompt_logprobs.items()
    ]


def _span(batch: StepBatch, row: int | None) -> tuple[int, int]:
    """First position of a row's tokens, and the one behind the last."""
    if row is None:
        return 0, 0
    return batch.starts[row], batch.starts[row] + batch.counts[row]
