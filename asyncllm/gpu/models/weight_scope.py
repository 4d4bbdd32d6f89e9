"""WeightScope: the weights of one part of a decoder by name, and ops made from them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.models.layers import GatedMLP
from asyncllm.gpu.models.parameter import Parameter
from asyncllm.gpu.ops.base import Linear, RMSNorm
from asyncllm.gpu.ops.linear_weights import LinearWeights, join_weights
from asyncllm.gpu.ops.quantise import QuantiseWeights
from asyncllm.gpu.ops.torch_ops import TorchOps

ParameterSource = Callable[[Parameter], Tensor | LinearWeights]
"""Function that returns a parameter's values. Those of an ``is_linear`` parameter may be quantised,
in a scheme that the op set accepts."""

ModuleRowCounts = Collection[tuple[str, int]]
"""Names of checkpoint modules whose rows are stacked, each with its number of rows."""


@dataclass(frozen=True, slots=True)
class WeightScope:
    """Part of a decoder in which the names of weights begin with the same prefixes.

    Attributes:
        source: function that returns the values of a parameter; called once for each parameter.
        quantise: function that quantises a linear layer's weights; None for no quantisation.
        prefix, stored_prefix: prefixes of names in the decoder and in the checkpoint, e.g.
            "layers.3." and "model.layers.3.".
    """

    model: ModelConfig
    ops: TorchOps
    source: ParameterSource
    quantise: QuantiseWeights | None = None
    prefix: str = ""
    stored_prefix: str = ""

    def child(self, prefix: str, stored_prefix: str) -> WeightScope:
        """Scope of a part within this one: both prefixes are extended."""
        return replace(
            self, prefix=self.prefix + prefix, stored_prefix=self.stored_prefix + stored_prefix
        )

    def parameter(
        self,
        name: str,
        modules: ModuleRowCounts,
        *row_shape: int,
        suffix: str = ".weight",
        **parameter_fields: Any,
    ) -> Parameter:
        """Describe a parameter that stacks ``modules``, with rows of shape ``row_shape``.

        Args:
            suffix: end of the parameter's name, and of the modules' names.
            parameter_fields: other fields of Parameter.
        """
        stored = tuple((f"{self.stored_prefix}{part}{suffix}", rows) for part, rows in modules)
        shape = (sum(rows for _, rows in modules), *row_shape)
        return Parameter(f"{self.prefix}{name}{suffix}", shape, stored, **parameter_fields)

    def tensor(self, name: str, stored_name: str, *shape: int, **parameter_fields: Any) -> Tensor:
        """Read a parameter that is one checkpoint tensor.

        Args:
            parameter_fields: other fields of Parameter.
        """
        parts = ((stored_name, shape[0]),)
        return self.plain_values(self.parameter(name, parts, *shape[1:], **parameter_fields))

    def float32_vector(
        self, name: str, size: int, stored_name: str | None = None, **fields: Any
    ) -> Tensor:
        """Read a float32 vector, called ``name`` in the checkpoint if ``stored_name`` is None."""
        return self.tensor(name, stored_name or name, size, suffix="", dtype="float32", **fields)

    def plain_values(self, parameter: Parameter) -> Tensor:
        """Tensor of a parameter that is never quantised, such as a norm's weight."""
        values = self.source(parameter)
        assert isinstance(values, Tensor)
        return values

    def linear(
        self, name: str, modules: ModuleRowCounts, width: int, bias: bool = False,
        row_order: Tensor | None = None, *, keep_unquantised: bool = False,
    ) -> Linear:  # fmt: skip
        """Make one linear layer, with ``width`` inputs, from the stacked weights of ``modules``.

        Args:
            row_order: order of the rows; None keeps the checkpoint's.
            keep_unquantised: whether the weight is read as plain values and stays plain.
        """
        weight = self.parameter(name, modules, width, is_linear=not keep_unquantised)
        own_bias = self.parameter(name, modules, suffix=".bias") if bias else None
        return self.ops.linear(self.linear_weights(weight, own_bias, row_order))

    def linear_weights(
        self, weight: Parameter, bias: Parameter | None = None, row_order: Tensor | None = None
    ) -> LinearWeights:
        """Weights of a linear layer for its op, quantised if configured, in ``row_order``."""
        weights = _as_linear_weights(self.source(weight))
        if bias is not None:
            weights = replace(weights, bias=self.plain_values(bias))
        if row_order is not None:
            weights = _reorder_rows(weights, row_order)
        return self.quantise_if_configured(weights) if weight.is_linear else weights

    def quantise_if_configured(self, weights: Tensor | LinearWeights) -> LinearWeights:
        """Quantise the weights of a linear layer, if that is configured."""
        weights = _as_linear_weights(weights)
        return weights if self.quantise is None else self.quantise(weights)

    def norm_weight(self, name: str, stored_name: str, width: int = 0, **fields: Any) -> Tensor:
        """Weight of a norm, ``[width]``; width 0 is the hidden size."""
        model = self.model
        dtype = "float32" if model.float32_norm_weights else None
        weight = self.tensor(name, stored_name, width or model.hidden_size, dtype=dtype, **fields)
        return weight + model.norm_offset if model.norm_offset else weight

    def norm(self, name: str, stored_name: str) -> RMSNorm:
        """Make a norm without residual addition."""
        return self.ops.rms_norm(self.norm_weight(name, stored_name), self.model.rms_norm_eps)

    def residual_norm(self, name: str, stored_name: str | None, scale: float = 1.0) -> RMSNorm:
        """Make the op before a block: it adds its input to the residual and normalises the sum.

        If ``stored_name`` is None, the op only adds.
        """
        eps, multiplier = self.model.rms_norm_eps, self.model.residual_multiplier
        if stored_name is None:
            return self.ops.residual_add(multiplier, scale)
        return self.ops.rms_norm(self.norm_weight(name, stored_name), eps, multiplier, scale)

    def gated_mlp(self, size: int) -> GatedMLP:
        """Make this scope's gated MLP with an intermediate size of ``size``."""
        names, hidden, bias = self.model.names, self.model.hidden_size, self.model.mlp_bias
        return GatedMLP(
            self.linear("gate_up", module_row_counts(names.gate_up, (size, size)), hidden, bias),
            self.activation,
            self.linear("down", ((names.down, hidden),), size, bias),
        )

    @property
    def activation(self) -> Callable[..., Tensor]:
        """Gated activation of the MLPs: ``activation(gate) * up``."""
        return self.ops.gelu_mul if self.model.activation == "gelu_tanh" else self.ops.silu_mul


def module_row_counts(names: tuple[str, ...], counts: tuple[int, ...]) -> ModuleRowCounts:
    """Pair modules with their numbers of rows; a single fused module gets the sum of ``counts``."""
    return tuple(zip(names, (sum(counts),) if len(names) == 1 else counts, strict=True))


def _as_linear_weights(weights: Tensor | LinearWeights) -> LinearWeights:
    return LinearWeights(weights) if isinstance(weights, Tensor) else weights


def _reorder_rows(weights: LinearWeights, row_order: Tensor) -> LinearWeights:
    """Reorder the rows of weights; scales and zero points have to be per row.

    Raises:
        ModelLoadError: a row would move into a part with another quantisation scheme.
    """
    parts, first = [], 0
    for part in weights.single_scheme_parts:
        last = first + part.shape[0]
        part_rows = row_order[first:last] - first
        if not bool(((part_rows >= 0) & (part_rows < last - first)).all()):
            raise ModelLoadError(
                f"rows {first} to {last - 1} of scheme {part.scheme!r} are in another order than "
                "their neighbours of another scheme, expected one scheme"
            )
        tensors = {name: getattr(part, name) for name in ("values", "bias", "scales", "zeros")}
        ordered = {
            name: tensor.index_select(0, part_rows.to(tensor.device))
            for name, tensor in tensors.items()
            if tensor is not None
        }
        parts.append(replace(part, **ordered))
        first = last
    return join_weights(parts)
