"""OneDNNOps: the op set in plain torch with weights packed for oneDNN, for CPUs.

At the batch sizes of decoding, oneDNN is 1.5 to 3 times as fast on a packed weight as on a plain
one, because it need not reorder the weight in every call. A call costs about 10 µs more than
``F.linear``, so that tiny products stay with ``F.linear``.

oneDNN caches its last 1,024 primitives for the life of the process. Every pair of weight shape and
number of rows takes one or two, of 0.3 MB each. Rows are therefore padded to buckets: steps of up
to 256 tokens have 56 different numbers of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.gpu.ops.base import Linear
from asyncllm.gpu.ops.cpu_ops import CpuOps
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.torch_ops import TorchLinear

MAX_TORCH_LINEAR_MULTIPLY_ADDS = 400_000
"""Product of rows and weight elements up to which ``F.linear`` is faster than oneDNN in float32. A
weight with fewer elements is kept both plain and packed, at most 1.6 MB each; a larger one only
packed. On a processor with AVX2 but not AVX-512, ``F.linear`` is faster for small weights at any
number of rows."""


def bucket_size(num_rows: int) -> int:
    """Number of rows to which a step of ``num_rows`` rows is padded.

    Up to 16 rows there is no padding. Above 16 rows there are 8 bucket sizes per power of two, and
    above 128 rows 16 sizes, because padding costs more where matrix products dominate a step.
    """
    step = 1 << max(0, (num_rows - 1).bit_length() - (4 if num_rows <= 128 else 5))
    return -(-num_rows // step) * step


class RowBucketedLinear:
    """Linear layer whose rows are padded to a bucket. No row's result depends on another row."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padding = bucket_size(num_rows) - num_rows
        if not padding:
            return self.linear(x)
        return self.linear(F.pad(x, (0, 0, 0, padding)))[:num_rows]


class PackedLinear:
    """Linear layer by oneDNN.

    Args:
        pack_weight: whether the layer packs a copy of the weight. False is for a weight that a tied
            embedding reads as well. Even then oneDNN may beat BLAS: in float32, 2 to 16 rows of 640
            inputs by 33,000 outputs take 0.6 to 0.7 of the time.
    """

    def __init__(self, weights: LinearWeights, *, pack_weight: bool = True) -> None:
        values = weights.values
        self.weight = torch.ops.mkldnn._reorder_linear_weight(values) if pack_weight else values
        self.bias = weights.bias
        self.linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.bias, "none", [], "")


class TorchOrPackedLinear:
    """Linear layer on a small float32 weight: ``F.linear`` for few rows, oneDNN for many."""

    def __init__(self, weights: LinearWeights) -> None:
        self.weight = weights.values
        self.bias = weights.bias
        self.packed = RowBucketedLinear(PackedLinear(weights))
        self.max_torch_rows = MAX_TORCH_LINEAR_MULTIPLY_ADDS // self.weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.max_torch_rows:
            return F.linear(x, self.weight, self.bias)
        return self.packed(x)


class OneDNNOps(CpuOps):
    """Op set in plain torch on a CPU, with linear layers by oneDNN."""

    name = "onednn"

    def make_linear(self, weights: LinearWeights) -> Linear:
        """Makes a linear layer; packs no copy of a large weight that a tied embedding reads."""
        dtype = weights.values.dtype
        small = weights.values.numel() <= MAX_TORCH_LINEAR_MULTIPLY_ADDS
        if weights.is_tied and not small and dtype != torch.float32:
            # Pad to buckets for plain weights too: torch calls oneDNN, which caches primitives.
            return RowBucketedLinear(TorchLinear(weights))
        if not onednn_works(dtype):
            return TorchLinear(weights)
        if weights.is_tied and not small:
            return RowBucketedLinear(PackedLinear(weights, pack_weight=False))
        if dtype != torch.float32 or not small:
            return RowBucketedLinear(PackedLinear(weights))
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            return TorchLinear(weights)
        return TorchOrPackedLinear(weights)


def onednn_works(dtype: torch.dtype = torch.float32) -> bool:
    """Whether torch's packed linear op exists and gives right results in ``dtype`` here.

    The test is needed because the op is private to torch (torch.compile uses it on CPUs).
    """
    if not torch.backends.mkldnn.is_available():
        return False
    x = torch.arange(12, dtype=dtype, device="cpu").view(3, 4)
    weight = torch.arange(20, dtype=dtype, device="cpu").view(5, 4)
    bias = torch.arange(5, dtype=dtype, device="cpu")
    try:
        output = PackedLinear(LinearWeights(weight, bias))(x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(output, F.linear(x, weight, bias), rtol=torch.finfo(dtype).eps)
