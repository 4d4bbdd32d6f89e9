"""Routing: chooses each token's experts and their weights by the router's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.checkpoint.experts_config import RoutingConfig
from asyncllm.gpu.ops.linear_weights import LinearWeights


@dataclass(frozen=True, slots=True, eq=False)
class RouterWeights:
    """The weights of a router.

    Attributes:
        linear: plain weight ``[num_experts, H]`` of the router. Its dtype, float32 or the
            model's, is that of the logits.
        correction: ``[num_experts]`` float32, added to the scores when experts are chosen. The
            experts' weights come from the scores without it.
        expert_scale: ``[num_experts]`` float32, a factor on each expert's weight.
    """

    linear: LinearWeights
    correction: Tensor | None = None
    expert_scale: Tensor | None = None


class Routing(Protocol):
    """Op that maps ``x [T, H]`` to the ids of each token's experts and their weights.

    Ids are ``[T, top_k]`` int32, all different in a row; weights are ``[T, top_k]`` float32.
    """

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


class TorchRouting:
    """``Routing`` in plain torch; CUDA graphs can capture it, as it reads nothing on the host."""

    def __init__(self, config: RoutingConfig, weights: RouterWeights) -> None:
        self.config = config
        self.weight, self.bias = weights.linear.values, weights.linear.bias
        self.correction = None if weights.correction is None else weights.correction.float()
        self.expert_scale = weights.expert_scale

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        logits = F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()
        scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if self.correction is None else scores + self.correction
        if config.num_groups > 1:
            choice = self._mask_to_best_groups(choice)
        ids = choice.topk(config.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if config.renormalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=config.min_weight_sum)
        weights = weights * config.scale
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[ids]
        return ids.int(), weights

    def _mask_to_best_groups(self, scores: Tensor) -> Tensor:
        """Sets the scores of experts outside the best groups to minus infinity."""
        grouped = scores.unflatten(1, (self.config.num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.config.top_groups, dim=-1).indices
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        return grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
