"""Experts: the gated MLPs of a mixture-of-experts layer, and their weighted sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.base import Linear
from asyncllm.gpu.ops.linear_weights import LinearWeights


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsWeights:
    """Weights of a layer's experts, stacked along the rows.

    Attributes:
        gate_up: ``[num_experts * 2 * intermediate_size, H]``; for each expert the gate rows, then
            the up rows.
        down: ``[num_experts * H, intermediate_size]``.

    Raises:
        ModelLoadError: the shapes of ``gate_up`` and ``down`` do not fit ``num_experts``.
    """

    num_experts: int
    gate_up: LinearWeights
    down: LinearWeights

    def __post_init__(self) -> None:
        (rows, hidden_size), (outputs, intermediate_size) = self.gate_up.shape, self.down.shape
        expected = (self.num_experts * 2 * intermediate_size, self.num_experts * hidden_size)
        if (rows, outputs) != expected:
            raise ModelLoadError(
                f"experts: gate_up and down have {rows} and {outputs} rows, expected {expected[0]} "
                f"and {expected[1]} for {self.num_experts} experts of size {intermediate_size}"
            )

    @property
    def hidden_size(self) -> int:
        """The hidden size H."""
        return self.gate_up.shape[1]

    @property
    def intermediate_size(self) -> int:
        """The intermediate size of an expert."""
        return self.down.shape[1]


def split_experts(weights: LinearWeights, num_experts: int) -> list[LinearWeights]:
    """Splits stacked weights into one view per expert.

    Raises:
        ModelLoadError: a block of scales spans two experts.
    """
    rows = weights.shape[0] // num_experts
    block = weights.scale_block

    def parts(tensor: Tensor | None, rows: int) -> list[Tensor] | list[None]:
        return [None] * num_experts if tensor is None else list(tensor.split(rows))

    if block is not None and rows % block[0]:
        raise ModelLoadError(
            f"experts of {rows} rows: expected a multiple of the {block[0]} that share a scale"
        )
    scale_rows = rows if block is None else rows // block[0]
    return [
        replace(weights, values=values, bias=bias, scales=scales, zeros=zeros)
        for values, bias, scales, zeros in zip(
            weights.values.split(rows),
            parts(weights.bias, rows),
            parts(weights.scales, scale_rows),
            parts(weights.zeros, scale_rows),
            strict=True,
        )
    ]


class Experts(Protocol):
    """Op that sums the weighted outputs of each token's experts in float32, ``[T, H]``."""

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Computes the experts of each token and their sum.

        Args:
            ids: ``[T, top_k]`` int32, each token's experts, all different.
            weights: ``[T, top_k]`` float32.
            shared: ``[T, H]``, output of the shared experts, which is added to the sum.
            gate: ``[T, 1]``, logits whose sigmoid is a factor on ``shared``.
        """
        ...


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """Clamped SwiGLU of gpt-oss, ``[T, 2 * I] -> [T, I]``."""
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def add_shared_expert(out: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """Adds a shared expert's output ``shared`` to the routed experts' ``out``.

    With a gate, ``shared`` is first multiplied by ``sigmoid(gate)``. Without a shared expert,
    returns ``out``.
    """
    if shared is None:
        return out
    return out + (shared if gate is None else gate.sigmoid() * shared)


class TorchExperts(ABC):
    """Base class of the plain torch ``Experts``; adds the shared experts' output to the sum.

    Args:
        gated_mul: activation, ``TorchOps.silu_mul`` or ``TorchOps.gelu_mul``; unused if
            ``config.limit`` is set, which asks for a clamped SwiGLU.
    """

    def __init__(self, config: ActivationConfig, gated_mul: Callable[[Tensor], Tensor]) -> None:
        limit = config.limit
        self.activation = gated_mul
        if limit is not None:
            self.activation = partial(clamped_swiglu, limit=limit, alpha=config.alpha)

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        return add_shared_expert(self.weighted_sum(x, ids, weights), shared, gate)

    @abstractmethod
    def weighted_sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sums the weighted outputs of each token's experts; see ``Experts``."""


class GroupedExperts(TorchExperts):
    """Experts by grouped matrix products, without host synchronisation, for CUDA graphs."""

    def __init__(
        self,
        weights: ExpertsWeights,
        config: ActivationConfig,
        gated_mul: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(config, gated_mul)
        self.num_experts, self.hidden_size = weights.num_experts, weights.hidden_size
        self.gate_up, self.down = weights.gate_up, weights.down

    def weighted_sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens, top_k = ids.shape
        expert_ids, order = ids.flatten().long().sort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int32, device=x.device)
        expert_ends = counts.scatter_add_(
            0, expert_ids, torch.ones_like(order, dtype=torch.int32)
        ).cumsum(0)
        expert_ends = expert_ends.to(torch.int32)
        inner = self.activation(
            self._grouped_linear(x[order // top_k], self.gate_up, expert_ids, expert_ends)
        )
        sorted_out = self._grouped_linear(inner, self.down, expert_ids, expert_ends).float()
        out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
        summed = (out.view(tokens, top_k, self.hidden_size) * weights.unsqueeze(-1)).sum(1)
        return summed.to(x.dtype)

    def _grouped_linear(
        self, x: Tensor, layer: LinearWeights, expert_ids: Tensor, expert_ends: Tensor
    ) -> Tensor:
        stack = layer.values.view(self.num_experts, -1, x.shape[1])
        out = F.grouped_mm(x, stack.transpose(1, 2), offs=expert_ends)
        return out if layer.bias is None else out + layer.bias.view(len(stack), -1)[expert_ids]


def tokens_by_expert(ids: Tensor, weights: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Groups tokens by expert, in the order of expert ids; experts without tokens are left out.

    Args:
        ids, weights: ``[T, top_k]``.

    Yields:
        The expert, the n tokens routed to it ``[n]``, and their weights for it ``[n, 1]``.
    """
    order = ids.flatten().argsort(stable=True)
    tokens, factors = order // ids.shape[1], weights.reshape(-1, 1)[order]
    end = 0
    for expert, count in enumerate(ids.flatten().bincount().tolist()):
        if count:
            start, end = end, end + count
            yield expert, tokens[start:end], factors[start:end]


class LoopedExperts(TorchExperts):
    """Experts computed one after the other, each by linear layers of the op set.

    Only experts that a token of the step was routed to are computed. On a CPU this is faster than
    a grouped product at any number of tokens. A token's experts are summed in the order of their
    ids, so that its result does not depend on the other tokens of the step.
    """

    def __init__(
        self,
        weights: ExpertsWeights,
        config: ActivationConfig,
        gated_mul: Callable[[Tensor], Tensor],
        make_linear: Callable[[LinearWeights], Linear],
    ) -> None:
        super().__init__(config, gated_mul)
        self.gate_up, self.down = (
            [make_linear(part) for part in split_experts(layer, weights.num_experts)]
            for layer in (weights.gate_up, weights.down)
        )

    def weighted_sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, tokens, factors in tokens_by_expert(ids, weights):
            inner = self.activation(self.gate_up[expert](x[tokens]))
            out.index_add_(0, tokens, self.down[expert](inner).float() * factors)
        return out.to(x.dtype)
