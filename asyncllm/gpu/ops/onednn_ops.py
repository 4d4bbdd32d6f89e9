"""The op set for CPUs: plain torch, with linear layers on weights packed for oneDNN.

oneDNN's packed layout saves it the reordering of the weight in every call, 1.5 to 3 times
at the batch sizes of decoding. A call costs about 10 µs more than ``F.linear``, so that tiny
products are left to that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.gpu.ops.base import Linear
from asyncllm.gpu.ops.torch_ops import TorchLinear, TorchOps

PLAIN_PRODUCT = 400_000
"""Rows times weight elements up to which ``F.linear`` is faster in float32. Weights no
larger than this are kept in both layouts, at most 1.6 MB each; all others in one."""


class PackedLinear:
    """A linear layer on a packed weight, which replaces the plain one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias
        self.linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.bias, "none", [], "")


class SmallLinear:
    """A linear layer on a small float32 weight: plain for few rows, packed for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.packed = PackedLinear(weight, bias)
        self.plain_rows = PLAIN_PRODUCT // weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.plain_rows:
            return F.linear(x, self.weight, self.bias)
        return self.packed(x)


class OneDNNOps(TorchOps):
    """Plain torch on a CPU, but for linear layers."""

    name = "onednn"

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.dtype == torch.float32 and weight.numel() <= PLAIN_PRODUCT:
            return SmallLinear(weight, bias)
        return PackedLinear(weight, bias)

    def shared_linear(self, weight: Tensor) -> Linear:
        if weight.numel() <= PLAIN_PRODUCT:
            return self.linear(weight, None)
        return TorchLinear(weight, None)


def onednn_works() -> bool:
    """Whether this torch has the packed linear op, and it computes what it should.

    The op is torch's own and private, used by its compiler on CPUs.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    x = torch.arange(12, dtype=torch.float32, device="cpu").view(3, 4)
    weight = torch.arange(20, dtype=torch.float32, device="cpu").view(5, 4)
    bias = torch.arange(5, dtype=torch.float32, device="cpu")
    try:
        found = PackedLinear(weight, bias)(x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(found, F.linear(x, weight, bias))
