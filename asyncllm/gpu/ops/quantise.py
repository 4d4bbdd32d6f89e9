"""quantise: the weights of a linear layer from floating point to a scheme of fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.linear_weights import LinearWeights

CHUNK = 2**22
"""Elements that are in float32 at a time."""


def quantise_int8(weights: LinearWeights) -> LinearWeights:
    """The nearest multiples of one scale per output channel, symmetric about zero.

    The greatest magnitude of a channel becomes 127, so an element is off by at most a 254th of
    it. A channel with NaN or infinity has such a scale, and its outputs are NaN.

    Args:
        weights: of scheme "plain".
    """
    values = weights.values
    largest = torch.linalg.vector_norm(values, ord=torch.inf, dim=1, keepdim=True)
    scales = largest.float().div_(127.0)
    # A channel of zeros stays one.
    divisors = scales.masked_fill(scales == 0.0, 1.0)
    rows = max(1, CHUNK // values.shape[1])
    chunks: list[tuple[Tensor, Tensor]] = list(
        zip(values.split(rows), divisors.split(rows), strict=True)
    )
    integers = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    for (part, scale), target in zip(chunks, integers.split(rows), strict=True):
        target.copy_((part / scale).round_().clamp_(-127.0, 127.0))
    return LinearWeights(
        integers,
        bias=weights.bias,
        scheme="int8",
        scales=scales,
        scale_block=(1, values.shape[1]),
    )
