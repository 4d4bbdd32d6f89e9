"""ModelInputs: the inputs of a step that the host prepares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(slots=True)
class ModelInputs:
    """A step's rows, flattened to T tokens; R rows, decodes first.

    The tensors are what the model reads on its device. The arrays are on the host, where
    attention plans the step from them. A step has one of these per KV group: they share
    all fields but the KV slots and the tables.

    Attributes:
        num_decodes: leading rows of one token each.
        token_ids: ``[T]`` int64; PLACEHOLDER_TOKEN where only the device has the token.
        positions: ``[T]`` int64, position of each token in its sequence.
        logits_indices: ``[S]`` int64, tokens whose logits are wanted, those that are sampled from
            first; None if all are.
        req_indices: ``[R]`` int64, each row's line in the block tables.
        host_req_indices: the same on the host.
        query_start_loc: ``[R + 1]`` int64, first token of each row, T last.
        seq_lens: ``[R]`` int64, tokens of each sequence up to this step's last.
        starts: ``[R]`` int64, position of each row's first token.
        slot_mapping: ``[T]`` int64, KV slot of each token.
        host_table: ``[N, W]`` int32 by request index; what lies beyond a sequence is undefined, and
            before the group's window it is the null block.
        device_table: the same on the device, where a DecodeRunner keeps it; None elsewhere.
        block_size: tokens per KV block.
    """

    num_decodes: int
    token_ids: Tensor
    positions: Tensor
    logits_indices: Tensor | None
    req_indices: Tensor
    host_req_indices: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    starts: np.ndarray
    slot_mapping: Tensor
    host_table: np.ndarray
    device_table: Tensor | None
    block_size: int

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def table_width(self) -> int:
        """Blocks of the longest row."""
        return -(-int(self.seq_lens.max()) // self.block_size)

    @property
    def block_table(self) -> np.ndarray:
        """``[R, table_width]`` int32, each row's blocks, gathered on the host."""
        return self.host_table[self.host_req_indices, : self.table_width]
