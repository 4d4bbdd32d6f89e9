"""OpSetLinear, OpSetExperts: replace transformers' layers by layers of the op set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asyncllm.gpu.ops.base import Embedding, Linear
from asyncllm.gpu.ops.experts import tokens_by_expert
from asyncllm.gpu.ops.linear_weights import LinearWeights


class OpSetLinear(nn.Module):
    """Replaces ``nn.Linear``: the op set computes the layer and owns its weight."""

    def __init__(self, linear: Linear, in_features: int, out_features: int) -> None:
        super().__init__()
        self.op = linear
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        out = self.op(x.reshape(-1, shape[-1]))
        return out.view(*shape[:-1], self.out_features)


class _TableEmbedding(nn.Embedding):
    """Base class that replaces ``nn.Embedding.forward`` by a look-up in another table."""

    def forward(self, input: Tensor) -> Tensor:
        out = self.__dict__["table"](input.reshape(-1))
        return out.view(*input.shape, out.shape[-1])


def replace_embedding_table(embedding: nn.Embedding, table: Embedding) -> None:
    """Make an ``nn.Embedding`` read ``table`` instead of its weight.

    The ``forward`` of a subclass has to call that of ``nn.Embedding``. The weight becomes empty,
    and keeps only its dtype.
    """
    kind: Any = type(embedding)
    bases = (_TableEmbedding,) if kind is nn.Embedding else (kind, _TableEmbedding)
    embedding.__class__ = type(kind.__name__, bases, {})
    embedding.__dict__["table"] = table
    embedding.weight = nn.Parameter(embedding.weight.new_empty(0), requires_grad=False)


class OpSetExperts:
    """Call handler that computes a module's experts with the op set's linear layers.

    Experts with at least one token are computed one after the other. On a CPU that is faster than a
    grouped matrix product at every number of tokens.

    Args:
        make_linear: function that makes a linear layer from weights ``[out, in]`` and a bias, and
            takes ownership of them.
        take_tensor: function that makes a tensor the engine's own, see ``TensorOwner.take_tensor``.
    """

    def __init__(
        self,
        module: Any,
        make_linear: Callable[[LinearWeights], Linear],
        take_tensor: Callable[[Tensor], Tensor],
    ) -> None:
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self.up = _make_expert_linears(module, first, make_linear, take_tensor)
        self.down = _make_expert_linears(module, "down_proj", make_linear, take_tensor)

    def experts(
        self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Compute the experts' output, ``[T, H] -> [T, H]``, summed in float32.

        Each token's experts are summed in ascending order, so that the token's result does not
        depend on other tokens of the step.
        """
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for expert, tokens, weights in tokens_by_expert(top_k_index, top_k_weights):
            inner = self.up[expert](hidden[tokens])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            result = self.down[expert](inner)
            if module.has_post_expert_norm:
                result = module.post_expert_norm(result)
            out.index_add_(0, tokens, (result * weights).float())
        return out.to(hidden.dtype)


def _make_expert_linears(
    module: Any,
    name: str,
    make_linear: Callable[[LinearWeights], Linear],
    take_tensor: Callable[[Tensor], Tensor],
) -> list[Linear]:
    """Make a linear layer per expert and drop the module's own parameters."""
    stacked = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else None
    linears = []
    for expert, values in enumerate(stacked):
        values = take_tensor(values.t() if module.is_transposed else values).contiguous()
        bias = None if biases is None else biases[expert].clone()
        linears.append(make_linear(LinearWeights(values, bias)))
    setattr(module, name, None)
    if biases is not None:
        setattr(module, f"{name}_bias", None)
    return linears
