"""GatedNorm: the gated norm that follows a gated delta rule."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from asyncllm.gpu.ops.torch_norms import make_torch_norm


class GatedNorm(Protocol):
    """Per-head root mean square norm, times SiLU of a gate.

    The normed values are rounded to the dtype of x before they are multiplied by the weight. SiLU
    of the gate is not rounded.
    """

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalises and gates each head of ``x [T, heads * D]``, for a norm weight of D elements.

        Args:
            gate: of the same shape as x.
        """
        ...


class TorchGatedNorm:
    """``GatedNorm`` in plain torch.

    Args:
        weight: ``[D]``, weight of the norm over the elements of a head.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.norm, self.size = make_torch_norm(weight, eps), len(weight)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.norm(x.view(-1, self.size)).view(x.shape)
        return (normed * F.silu(gate.float())).to(x.dtype)
