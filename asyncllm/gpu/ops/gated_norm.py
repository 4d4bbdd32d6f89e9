"""GatedNorm: the norm of each head after a gated delta rule, times its gate."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from asyncllm.gpu.ops.base import RMSNorm


class GatedNorm(Protocol):
    """Root mean square norm of each head, times SiLU of the gate.

    The norm is rounded to the dtype of x before its weight; SiLU of the gate is not rounded.
    """

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """``[T, heads * D] -> [T, heads * D]``, where D is the size of the norm's weight.

        Args:
            gate: has the shape of x.
        """
        ...


class TorchGatedNorm:
    """The norm in plain torch.

    Args:
        norm: norm of one head.
        size: elements of a head.
    """

    def __init__(self, norm: RMSNorm, size: int) -> None:
        self.norm, self.size = norm, size

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.norm(x.view(-1, self.size)).view(x.shape)
        return (normed * F.silu(gate.float())).to(x.dtype)
