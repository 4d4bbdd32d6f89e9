"""LayerInputs: what each layer takes of a token beside the hidden states (per-layer embeddings)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncllm.gpu.models.layers import Layer, StepContext
from asyncllm.gpu.models.scope import Scope
from asyncllm.gpu.ops.base import Embedding, Linear, RMSNorm


@dataclass(slots=True)
class LayerInputs:
    """Of all layers at once: the token's entry of a table of its own, and a normed projection of
    its embedding.

    Attributes:
        table: ``[T] -> [T, layers * P]``.
        projection: ``[T, H] -> [T, layers * P]``.
        norm: of each P of them.
        add: the sum of two tensors.
    """

    table: Embedding
    projection: Linear
    norm: RMSNorm
    add: RMSNorm
    num_layers: int

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Returns ``[T, layers, P]``.

        Args:
            embedded: ``[T, H]``, the input of the first layer.
        """
        projected = self.projection(embedded).unflatten(1, (self.num_layers, -1))
        normed = self.norm(projected)
        return self.add.add(normed.flatten(1), self.table(token_ids))[0].view(normed.shape)


@dataclass(slots=True)
class InputLayer:
    """A layer, and behind it a block around the residual that is gated by the layer's own input.

    Attributes:
        add: the sum of a layer's output and the residual.
        activation: of a gate, times what it gates.
        index: of the layer.
    """

    layer: Layer
    add: RMSNorm
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
        hidden, residual = self.add.add(*self.layer(x, residual, step))
        assert step.inputs is not None
        own = step.inputs[:, self.index]
        if step.rows is not None:
            own = own[step.rows]
        return self.norm(self.projection(self.activation(self.gate(hidden), own))), residual


def build_layer_inputs(scope: Scope) -> LayerInputs | None:
    """The factors of Gemma 4: the table's is the root of its size, the projection's that of the
    inverse of the hidden size, and that of their sum the root of 1/2. The second is the norm's to
    take: of x * c with eps it is the norm of x with eps / c ** 2."""
    model, ops, config = scope.model, scope.ops, scope.model.layer_input
    if config is None:
        return None
    scope, width = scope.at("layer_inputs.", "model."), model.num_layers * config.size
    values = scope.tensor("table", "embed_tokens_per_layer", config.vocab_size, width)
    multiplier = torch.tensor(config.size**0.5, dtype=values.dtype).item() * 0.5**0.5
    rows = (("per_layer_model_projection", width),)
    projection = scope.linear("projection", rows, model.hidden_size)
    weight = scope.norm_weight("norm", "per_layer_projection_norm", config.size)
    norm = ops.rms_norm(weight * 0.5**0.5, model.rms_norm_eps * model.hidden_size)
    table, add = ops.embedding(values, multiplier), ops.residual_add()
    return LayerInputs(table, projection, norm, add, model.num_layers)


def build_input_layer(scope: Scope, size: int, layer: Layer, index: int) -> InputLayer:
    """``layer``, which is that of ``scope``, and the block behind it, whose input has ``size``."""
    hidden, scope = scope.model.hidden_size, scope.at("input.", "")
    return InputLayer(
        layer,
        add=scope.ops.residual_add(scope.model.residual_multiplier),
        gate=scope.linear("gate", (("per_layer_input_gate", size),), hidden),
        activation=scope.activation,
        projection=scope.linear("projection", (("per_layer_projection", hidden),), size),
        norm=scope.norm("norm", "post_per_layer_input_norm"),
        index=index,
    )
