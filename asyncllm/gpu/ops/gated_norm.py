"""GatedNorm: the norm of each head behind a gated delta rule, times its gate."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from asyncllm.gpu.ops.base import RMSNorm


class GatedNorm(Protocol):
    """Root mean square norm of each head, rounded to the dtype of x before its weight, times SiLU
    of the gate, which is not rounded."""

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """``[T, heads * D] -> [T, heads * D]``, D being the size of the norm's weight.

        Args:
            gate: of the shape of x.
        """
        ...


class TorchGatedNorm:
    """The norm in plain torch.

    Args:
        norm: of one head.
        size: of a head.
    """

    def __init__(self, norm: RMSNorm, size: int) -> None:
        self.norm, self.size = norm, size

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.norm(x.view(-1, self.size)).view(x.shape)
        return (normed * F.silu(gate.float())).to(x.dtype)
