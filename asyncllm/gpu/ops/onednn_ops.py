"""OneDNNOps: the op set in plain torch with linear layers packed for oneDNN, for CPUs.

A packed weight saves oneDNN the reordering in every call, which makes it 1.5 to 3 times as fast at
the batch sizes of decoding. A call costs about 10 µs more than ``F.linear``, which therefore
computes tiny products.

oneDNN caches its last 1,024 primitives for the life of the process, one or two for every
weight shape and number of rows, of 0.3 MB each. Rows are padded to buckets, so that steps of up to
256 tokens have 56 different numbers of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.gpu.ops.base import Linear
from asyncllm.gpu.ops.cpu_ops import CpuOps
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.torch_ops import TorchLinear

PLAIN_PRODUCT = 400_000
"""Rows times weight elements up to which ``F.linear`` is faster in float32. Smaller weights are
kept in both layouts, at most 1.6 MB each; larger ones are packed. On a processor with AVX2 alone
``F.linear`` is faster for small weights at any number of rows."""


def bucket(num_rows: int) -> int:
    """The number of rows to which ``num_rows`` are padded.

    It is exact up to 16. Buckets have 8 sizes to an octave, above 128 rows 16, because the matrix
    products' share of a step grows with the rows.
    """
    step = 1 << max(0, (num_rows - 1).bit_length() - (4 if num_rows <= 128 else 5))
    return -(-num_rows // step) * step


class BucketedLinear:
    """A linear layer with its rows padded to a bucket. No row's result depends on another row."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padding = bucket(num_rows) - num_rows
        if not padding:
            return self.linear(x)
        return self.linear(F.pad(x, (0, 0, 0, padding)))[:num_rows]


class PackedLinear:
    """A linear layer on a packed weight, which replaces the plain one.

    Args:
        packs: False computes with the plain weight, which others read too. In float32, 2 to 16
            rows of 640 inputs by 33,000 outputs take 0.6 to 0.7 of the time that BLAS takes.
    """

    def __init__(self, weights: LinearWeights, *, packs: bool = True) -> None:
        values = weights.values
        self.weight = torch.ops.mkldnn._reorder_linear_weight(values) if packs else values
        self.bias = weights.bias
        self.linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.bias, "none", [], "")


class SmallLinear:
    """A linear layer on a small float32 weight: plain for few rows, packed for many."""

    def __init__(self, weights: LinearWeights) -> None:
        self.weight = weights.values
        self.bias = weights.bias
        self.packed = BucketedLinear(PackedLinear(weights))
        self.plain_rows = PLAIN_PRODUCT // self.weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.plain_rows:
            return F.linear(x, self.weight, self.bias)
        return self.packed(x)


class OneDNNOps(CpuOps):
    """Plain torch on a CPU, with linear layers by oneDNN."""

    name = "onednn"

    def make_linear(self, weights: LinearWeights) -> Linear:
        """Makes a packed layer, unless that would keep a second copy of a large weight."""
        dtype, small = weights.values.dtype, weights.values.numel() <= PLAIN_PRODUCT
        if weights.shared and not small and dtype != torch.float32:
            # torch calls oneDNN, which caches primitives for plain weights as well.
            return BucketedLinear(TorchLinear(weights))
        if not onednn_works(dtype):
            return TorchLinear(weights)
        if weights.shared and not small:
            return BucketedLinear(PackedLinear(weights, packs=False))
        if dtype != torch.float32 or not small:
            return BucketedLinear(PackedLinear(weights))
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            return TorchLinear(weights)
        return SmallLinear(weights)


def onednn_works(dtype: torch.dtype = torch.float32) -> bool:
    """Whether torch's packed linear op exists and gives right results in ``dtype`` here.

    The op is private to torch, whose compiler uses it on CPUs.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    x = torch.arange(12, dtype=dtype, device="cpu").view(3, 4)
    weight = torch.arange(20, dtype=dtype, device="cpu").view(5, 4)
    bias = torch.arange(5, dtype=dtype, device="cpu")
    try:
        found = PackedLinear(LinearWeights(weight, bias))(x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(found, F.linear(x, weight, bias), rtol=torch.finfo(dtype).eps)
