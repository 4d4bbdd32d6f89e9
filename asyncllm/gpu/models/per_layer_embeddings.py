"""PerLayerEmbeddings: embeddings of tokens for each layer, beside the hidden states."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncllm.gpu.models.layers import Layer, StepContext
from asyncllm.gpu.models.weight_scope import WeightScope
from asyncllm.gpu.ops.base import Embedding, Linear, RMSNorm


@dataclass(slots=True)
class PerLayerEmbeddings:
    """Embeddings for each layer: a table entry per token, plus the projected input of layer 0.

    Each layer gets P elements per token.

    Attributes:
        token_embedding: ``[T] -> [T, layers * P]``.
        projection: ``[T, H] -> [T, layers * P]``.
        norm: norm of each layer's P projected elements.
        residual_add: op that adds two tensors.
    """

    token_embedding: Embedding
    projection: Linear
    norm: RMSNorm
    residual_add: RMSNorm
    num_layers: int

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Compute the per-layer embeddings of tokens, ``[T, layers, P]``.

        Args:
            embedded: ``[T, H]``, the input of the first layer.
        """
        projected = self.projection(embedded).unflatten(1, (self.num_layers, -1))
        normed = self.norm(projected)
        looked_up = self.token_embedding(token_ids)
        return self.residual_add.add_and_norm(normed.flatten(1), looked_up)[0].view(normed.shape)


@dataclass(slots=True)
class LayerWithPerLayerEmbedding:
    """A layer, followed by a residual block with a gate on the layer's own embedding.

    Attributes:
        residual_add: op that adds the layer's output to the residual.
        activation: op ``activation(gate) * up``, with the layer's embedding as ``up``.
        index: index of the layer.
    """

    layer: Layer
    residual_add: RMSNorm
    gate: Linear
    activation: Callable[[Tensor, Tensor], Tensor]
    projection: Linear
    norm: RMSNorm
    index: int
    kind: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.kind = self.layer.kind

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.residual_add.add_and_norm(*self.layer(x, residual, step))
        assert step.per_layer_embeddings is not None
        own = step.per_layer_embeddings[:, self.index]
        if step.output_tokens is not None:
            own = own[step.output_tokens]
        return self.norm(self.projection(self.activation(self.gate(hidden), own))), residual


def build_per_layer_embeddings(scope: WeightScope) -> PerLayerEmbeddings | None:
    """Build the per-layer embeddings; None for a model without them.

    As in Gemma 4, the table is multiplied by ``size ** 0.5``, the projection by ``hidden_size **
    -0.5``, and their sum by ``0.5 ** 0.5``. The projection's factor is folded into the norm's
    epsilon: the norm of c * x with eps is the norm of x with eps / c ** 2.
    """
    model, ops, config = scope.model, scope.ops, scope.model.layer_input
    if config is None:
        return None
    scope, width = scope.child("layer_inputs.", "model."), model.num_layers * config.size
    values = scope.tensor("table", "embed_tokens_per_layer", config.vocab_size, width)
    multiplier = torch.tensor(config.size**0.5, dtype=values.dtype).item() * 0.5**0.5
    rows = (("per_layer_model_projection", width),)
    projection = scope.linear("projection", rows, model.hidden_size)
    weight = scope.norm_weight("norm", "per_layer_projection_norm", config.size)
    norm = ops.rms_norm(weight * 0.5**0.5, model.rms_norm_eps * model.hidden_size)
    token_embedding, residual_add = ops.embedding(values, multiplier), ops.residual_add()
    return PerLayerEmbeddings(token_embedding, projection, norm, residual_add, model.num_layers)


def wrap_with_per_layer_embedding(
    scope: WeightScope, size: int, layer: Layer, index: int
) -> LayerWithPerLayerEmbedding:
    """Append to ``layer`` a residual block that reads its per-layer embedding.

    Args:
        size: columns of the per-layer embedding.
    """
    hidden, scope = scope.model.hidden_size, scope.child("input.", "")
    return LayerWithPerLayerEmbedding(
        layer,
        residual_add=scope.ops.residual_add(scope.model.residual_multiplier),
        gate=scope.linear("gate", (("per_layer_input_gate", size),), hidden),
        activation=scope.activation,
        projection=scope.linear("projection", (("per_layer_projection", hidden),), size),
        norm=scope.norm("norm", "post_per_layer_input_norm"),
        index=index,
    )
