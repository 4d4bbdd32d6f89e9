"""Experts in float64, as the definition says."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from asyncllm.checkpoint.experts_config import ActivationConfig
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.linear_weights import LinearWeights


def exact_experts(
    weights: ExpertsWeights,
    config: ActivationConfig,
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """What ``Experts`` returns, one expert of all tokens at a time."""
    out = torch.zeros(len(x), weights.width, dtype=torch.float64)

    def linear(layer: LinearWeights, expert: int, rows: Tensor) -> Tensor:
        count = layer.shape[0] // weights.num_experts
        part = slice(expert * count, (expert + 1) * count)
        found = rows @ layer.values[part].double().T
        return found if layer.bias is None else found + layer.bias[part].double()

    for expert in range(weights.num_experts):
        left, up = linear(weights.gate_up, expert, x.double()).chunk(2, -1)
        if config.limit is None:
            inner = (gelu(left, approximate="tanh") if config.gelu else left * left.sigmoid()) * up
        else:
            left, up = left.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
            inner = (up + 1) * left * (config.alpha * left).sigmoid()
        factor = factors.double().masked_fill(ids != expert, 0.0).sum(-1, keepdim=True)
        out += factor * linear(weights.down, expert, inner)
    if shared is not None:
        out += shared.double() * (1.0 if gate is None else gate.double().sigmoid())
    return out
