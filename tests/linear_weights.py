"""Quantised linear weights in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.linear_weights import LinearWeights


def over_inputs(grid: Tensor, weights: LinearWeights) -> Tensor:
    assert weights.scale_block is not None
    return grid.double().repeat_interleave(weights.scale_block[1], 1)[:, : weights.shape[1]]


def dequantised(weights: LinearWeights) -> Tensor:
    values, scales = weights.values, weights.scales
    assert scales is not None
    if weights.scheme == "int4":
        values = torch.stack((values & 15, values >> 4), dim=2).flatten(1)
    values = values.double()
    if weights.zeros is not None:
        values -= over_inputs(weights.zeros, weights)
    return values * over_inputs(scales, weights)


def rounded(x: Tensor) -> Tensor:
    """Rows as the kernels read them: integers from -127 to 127, with a scale for each 32."""
    rows, columns = x.shape
    spans = torch.nn.functional.pad(x.float(), (0, -columns % 32)).view(rows, -1, 32)
    largest = spans.abs().amax(2, keepdim=True)
    # A number divided by a tensor is its reciprocal times the number to torch, rounded twice.
    factor = torch.where(largest > 1e-30, torch.full_like(largest, 127.0) / largest, 0.0)
    values = (spans * factor).round().double() * (largest / 127.0).double()
    return values.view(rows, -1)[:, :columns]
