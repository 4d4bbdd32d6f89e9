"""DecodeInputs: the inputs of a decode step, on the device at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """B rows of one token each, padded to the size of a bucket; N request indices, W blocks a
    sequence.

    Rows and table changes come from the host, the rest is computed on the device. A step has one of
    these per KV group: they share all fields but KV slots, table and changes. Index N is a dummy
    for padded rows: they may write its line, and no row reads it.

    Attributes:
        req_indices: ``[B]`` int64; -1 for a padded row.
        host_token_ids: ``[B]`` int64, the token that a row goes on from, -1 where the step
            before sampled it and only the device has it.
        positions: ``[B]`` int64, of that token in its sequence; 0 in a padded row.
        block_table: ``[N + 1, W]`` int32, contiguous, by request index; what lies beyond a sequence
            is undefined, and before the group's window it is the null block.
        table_changes: ``[C]`` int64, indices into the flat table, and ``[C]`` int32, their new
            values, to be made before the table is read. An index that is there twice has the same
            value each time; padding is an index of line N.
        token_ids: ``[B]`` int64.
        seq_lens: ``[B]`` int32, tokens of each sequence after the step; 0 in a padded row.
        slot_mapping: ``[B]`` int64, KV slot of each token; slot 0 of the null block in a padded
            row.
        last_sampled_tokens: ``[N + 1]`` int64, by request index.
        block_size: tokens per block.
        max_len: longest sequence in tokens.
        balanced: attention that can shares the keys of the rows out by their lengths, which differ
            much.
    """

    req_indices: Tensor
    host_token_ids: Tensor
    positions: Tensor
    block_table: Tensor
    table_changes: tuple[Tensor, Tensor]
    token_ids: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    last_sampled_tokens: Tensor
    block_size: int
    max_len: int
    balanced: bool = False

    @property
    def num_rows(self) -> int:
        return self.req_indices.shape[0]

    def state_indices(self) -> Tensor:
        """``[B]`` int64: each row's request index, N for a padded row."""
        return torch.where(
            self.req_indices < 0, len(self.last_sampled_tokens) - 1, self.req_indices
        )

    def tables(self) -> Tensor:
        """``[B, W]`` int32: each row's block table, gathered on the device."""
        return self.block_table.index_select(0, self.state_indices())


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters by request index on the device, ``[N + 1]`` each.

    Attributes:
        states: int64, the bits of the seeds' 64-bit states.
        temperature, top_p, min_p: float32.
        top_k: int32, 0 for all.
    """

    states: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
