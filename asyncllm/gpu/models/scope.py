"""Scope: a part of the decoder under construction, which names weights and makes ops of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.models.layers import GatedMLP
from asyncllm.gpu.models.parameter import Parameter
from asyncllm.gpu.ops.base import Linear, RMSNorm
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.quantise import Convert
from asyncllm.gpu.ops.torch_ops import TorchOps

Source = Callable[[Parameter], Tensor | LinearWeights]
"""The values of a parameter; of one that is ``linear`` in any form that the op set takes."""

Parts = Collection[tuple[str, int]]
"""Modules of a checkpoint whose rows are stacked, and how many each has."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A part of the decoder under construction: names below are those within it.

    Attributes:
        source: asked for each weight where an op is made of it, once.
        convert: a quantisation of the weights of linear layers.
        own, stored: the prefix of names in the decoder and in the checkpoint, e.g. "layers.3." and
            "model.layers.3.".
    """

    model: ModelConfig
    ops: TorchOps
    source: Source
    convert: Convert | None = None
    own: str = ""
    stored: str = ""

    def at(self, own: str, stored: str) -> Scope:
        """A part of this one."""
        return replace(self, own=self.own + own, stored=self.stored + stored)

    def parameter(
        self, name: str, parts: Parts, *width: int, suffix: str = ".weight", **fields: Any
    ) -> Parameter:
        """A parameter of the rows of ``parts``, each of shape ``width``.

        Args:
            suffix: of its own name, and of those of the parts.
            fields: others of Parameter.
        """
        stored = tuple((f"{self.stored}{part}{suffix}", rows) for part, rows in parts)
        shape = (sum(rows for _, rows in parts), *width)
        return Parameter(f"{self.own}{name}{suffix}", shape, stored, **fields)

    def tensor(self, name: str, stored: str, rows: int, *width: int, **fields: Any) -> Tensor:
        """The values of a parameter that is one tensor of the checkpoint; see ``parameter``."""
        return self.take(self.parameter(name, ((stored, rows),), *width, **fields))

    def vector(self, name: str, size: int, stored: str | None = None, **fields: Any) -> Tensor:
        """A vector that stays in float32; ``stored`` is ``name`` unless it is given."""
        return self.tensor(name, stored or name, size, suffix="", dtype="float32", **fields)

    def take(self, parameter: Parameter) -> Tensor:
        """The values of a parameter that cannot come packed."""
        values = self.source(parameter)
        assert isinstance(values, Tensor)
        return values

    def linear(
        self, name: str, parts: Parts, width: int, bias: bool = False, order: Tensor | None = None,
        *, exact: bool = False,
    ) -> Linear:  # fmt: skip
        """A linear layer of the rows of ``parts``, ``width`` columns each.

        Args:
            order: of the rows; None is as they are.
            exact: computed as the checkpoint has it, neither packed nor converted.
        """
        weight = self.parameter(name, parts, width, linear=not exact)
        own_bias = self.parameter(name, parts, suffix=".bias") if bias else None
        return self.ops.linear(self.linear_weights(weight, own_bias, order))

    def linear_weights(
        self, weight: Parameter, bias: Parameter | None = None, order: Tensor | None = None
    ) -> LinearWeights:
        """The weights of a linear layer as its op takes them, with its rows in ``order``."""
        weights = _as_linear(self.source(weight))
        if bias is not None:
            weights = replace(weights, bias=self.take(bias))
        if order is not None:
            weights = _in_order(weights, order)
        return self.converted(weights) if weight.linear else weights

    def converted(self, weights: Tensor | LinearWeights) -> LinearWeights:
        """The weights of a linear layer, quantised where they are to be."""
        weights = _as_linear(weights)
        return weights if self.convert is None else self.convert(weights)

    def norm_weight(self, name: str, stored: str, width: int = 0, **fields: Any) -> Tensor:
        """The weight of a norm, ``[width]``; 0 is the hidden size."""
        model = self.model
        dtype = "float32" if model.wide_norms else None
        weight = self.tensor(name, stored, width or model.hidden_size, dtype=dtype, **fields)
        return weight + model.norm_offset if model.norm_offset else weight

    def norm(self, name: str, stored: str) -> RMSNorm:
        """A norm that adds nothing to the residual."""
        return self.ops.rms_norm(self.norm_weight(name, stored), self.model.rms_norm_eps)

    def norm_before(self, name: str, stored: str | None, scale: float = 1.0) -> RMSNorm:
        """The norm before a block, which adds its input to the residual; the sum alone where
        ``stored`` is None."""
        eps, multiplier = self.model.rms_norm_eps, self.model.residual_multiplier
        if stored is None:
            return self.ops.residual_add(multiplier, scale)
        return self.ops.rms_norm(self.norm_weight(name, stored), eps, multiplier, scale)

    def gated_mlp(self, size: int) -> GatedMLP:
        """The scope as a gated MLP of intermediate size ``size``."""
        names, hidden, bias = self.model.names, self.model.hidden_size, self.model.mlp_bias
        return GatedMLP(
            self.linear("gate_up", stacked(names.gate_up, (size, size)), hidden, bias),
            self.activation,
            self.linear("down", ((names.down, hidden),), size, bias),
        )

    @property
    def activation(self) -> Callable[..., Tensor]:
        """That of the model's MLPs, times what it gates."""
        return self.ops.gelu_mul if self.model.activation == "gelu_tanh" else self.ops.silu_mul


def stacked(names: tuple[str, ...], rows: tuple[int, ...]) -> Parts:
    """The rows of each module; all of them where there is one module."""
    return tuple(zip(names, (sum(rows),) if len(names) == 1 else rows, strict=True))


def _as_linear(weights: Tensor | LinearWeights) -> LinearWeights:
    return LinearWeights(weights) if isinstance(weights, Tensor) else weights


def _in_order(weights: LinearWeights, rows: Tensor) -> LinearWeights:
    """``weights`` with its rows in another order. Scales and zeros, where there are any, are those
    of a row."""
    parts = {name: getattr(weights, name) for name in ("values", "bias", "scales", "zeros")}
    ordered = {
        name: part.index_select(0, rows.to(part.device))
        for name, part in parts.items()
        if part is not None
    }
    return replace(weights, **ordered)
