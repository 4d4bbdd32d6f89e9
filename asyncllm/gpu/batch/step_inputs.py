"""ModelInputs: what one step of the model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.h2d import copy_to_device


@dataclass(frozen=True, slots=True)
class HostInputs:
    """A step's rows on the host, flattened to T tokens; R rows, decodes first.

    Attributes:
        num_decodes: leading rows of one token each.
        token_ids: ``[T]`` int64; -1 where only the device has the token.
        positions: ``[T]`` int64, position of each token in its sequence.
        slot_mapping: ``[T]`` int64, where each token's K and V go.
        logits_indices: ``[S]`` int64, tokens whose logits are wanted; None if all are.
        query_start_loc: ``[R + 1]`` int64, first token of each row, T last.
        seq_lens: ``[R]`` int64, tokens of each sequence up to this step's last.
        starts: ``[R]`` int64, position of each row's first token.
        block_table: ``[R, W]`` int32, blocks of each row; what lies beyond a row's own blocks
            is undefined.
    """

    num_decodes: int
    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    logits_indices: np.ndarray | None
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    starts: np.ndarray
    block_table: np.ndarray
    block_size: int


@dataclass(slots=True)
class ModelInputs:
    """The same with the tensors of the model on its device.

    The host arrays are what attention plans a step from; a backend that reads them on a
    device uploads them in its plan, once for all layers.

    Attributes:
        token_ids, positions, slot_mapping, logits_indices: see HostInputs.
        query_start_loc, seq_lens, starts, block_table: on the host.
    """

    num_decodes: int
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logits_indices: Tensor | None
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    starts: np.ndarray
    block_table: np.ndarray
    block_size: int

    @classmethod
    def from_arrays(cls, arrays: HostInputs, device: torch.device) -> ModelInputs:
        """Queues the copies to ``device``."""
        indices = arrays.logits_indices
        return cls(
            num_decodes=arrays.num_decodes,
            token_ids=copy_to_device(arrays.token_ids, device),
            positions=copy_to_device(arrays.positions, device),
            slot_mapping=copy_to_device(arrays.slot_mapping, device),
            logits_indices=None if indices is None else copy_to_device(indices, device),
            query_start_loc=arrays.query_start_loc,
            seq_lens=arrays.seq_lens,
            starts=arrays.starts,
            block_table=arrays.block_table,
            block_size=arrays.block_size,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        return len(self.starts)
