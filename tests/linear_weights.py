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
