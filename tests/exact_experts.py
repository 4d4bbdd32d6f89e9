"""Experts in float64, and kinds of routing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import gelu

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.routing import RouterWeights

SOFTMAX = RoutingConfig(12, 3)
ROUTINGS = {
    "softmax": SOFTMAX,
    "renormalised": replace(SOFTMAX, renormalise=True),
    "all of them": replace(SOFTMAX, top_k=12, renormalise=True),
    "router with a bias": replace(SOFTMAX, has_bias=True, renormalise=True),
    "sigmoid": replace(SOFTMAX, scoring="sigmoid", scale=2.5),
    "correction": replace(SOFTMAX, scoring="sigmoid", has_correction_bias=True, renormalise=True),
    "scaled experts": replace(SOFTMAX, renormalise=True, scale=1.5, has_expert_scale=True),
    "groups": RoutingConfig(
        12,
        4,
        "sigmoid",
        renormalise=True,
        scale=1.8,
        num_groups=4,
        top_groups=2,
        has_correction_bias=True,
    ),
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def router_weights(config: RoutingConfig, dtype: torch.dtype = torch.float32) -> RouterWeights:
    count = config.num_experts
    bias = randn(count, seed=2).to(dtype) if config.has_bias else None
    correction = randn(count, seed=3) * 0.3 if config.has_correction_bias else None
    rows = LinearWeights(randn(count, 40, seed=1).to(dtype) * 0.3, bias)
    scale = 1 + randn(count, seed=11) * 0.3 if config.has_expert_scale else None
    return RouterWeights(rows, correction, scale)


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
    out = torch.zeros(len(x), weights.hidden_size, dtype=torch.float64)

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
