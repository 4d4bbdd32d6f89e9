"""StepInputs: the tensors that one step of the model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(slots=True)
class StepInputs:
    """A step's rows, flattened to T tokens; R rows, decodes first.

    The host arrays are what attention plans a step from; a backend that reads them on a
    device uploads them in its plan, once for all layers.

    Attributes:
        num_decodes: leading rows of one token each.
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64, position of each token in its sequence.
        slot_mapping: ``[T]`` int64, where each token's K and V go.
        logits_indices: ``[S]`` int64, tokens whose logits are wanted; None if all are.
        query_start_loc: host ``[R + 1]`` int64, first token of each row, T last.
        seq_lens: host ``[R]`` int64, tokens of each sequence up to this step's last.
        starts: host ``[R]`` int64, position of each row's first token.
        block_table: host ``[R, W]`` int32, blocks of each row; what lies beyond a row's
            own blocks is undefined.
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

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        return len(self.starts)
