"""LayerInputs: what each layer takes of a token beside the hidden states (per-layer embeddings)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

from asyncllm.gpu.models.layers import Layer, StepContext
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
