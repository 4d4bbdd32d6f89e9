"""CausalConv: a short depthwise convolution over the tokens of each sequence."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.gpu.batch.state_rows import StateRows, span_state


class CausalConv(Protocol):
    """Causal depthwise convolution of width W, followed by SiLU, ``x [T, C] -> [T, C]``.

    A row's result depends on its own inputs and its own state alone.
    """

    def __call__(self, x: Tensor, state: Tensor, rows: Any) -> Tensor:
        """Convolves a step's rows, and updates their states in place.

        Args:
            state: ``[num_slots, W - 1, C]``, the last inputs of each sequence, the oldest first. A
                row at position 0 starts from zeros instead.
            rows: result of ``TorchOps.state_rows``, shared by all layers of a step.
        """
        ...


class TorchCausalConv:
    """``CausalConv`` in plain torch, which sums in float32 from the oldest input on.

    Args:
        weight: ``[C, W]``, the oldest input's weight first.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.float().T.contiguous()

    def __call__(self, x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        out, width = torch.empty_like(x, memory_format=torch.contiguous_format), len(self.weight)
        if rows.slots is not None:
            count = len(rows.slots)
            inputs = torch.cat((rows.gather(state), x[:count].unsqueeze(1)), 1)
            out[:count] = self._convolve(inputs).squeeze(1)
            state.index_copy_(0, rows.slots, inputs[:, 1:])
        for span in rows.spans:
            row_state = span_state(state, span)
            inputs = torch.cat((row_state, x[span.start : span.end].unsqueeze(0)), 1)
            out[span.start : span.end] = self._convolve(inputs)[0]
            row_state.copy_(inputs[:, 1 - width :])
        return out

    def _convolve(self, inputs: Tensor) -> Tensor:
        """Convolves ``inputs [B, n + W - 1, C] -> [B, n, C]``."""
        count = inputs.shape[1] + 1 - len(self.weight)
        total = inputs[:, :count].float() * self.weight[0]
        for index, weight in enumerate(self.weight[1:], 1):
            total.addcmul_(inputs[:, index : index + count].float(), weight)
        return F.silu(total.to(inputs.dtype))
