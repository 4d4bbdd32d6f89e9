"""LinearWeights: weights of a linear layer, plain or quantised, from which op sets make the
layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from asyncllm.errors import ModelLoadError

QuantScheme = Literal[
    "plain", "int8", "e4m3", "int4", "e2m1",
    "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl",
]  # fmt: skip

GGUF_BLOCK_SIZES: Mapping[QuantScheme, tuple[int, int]] = {
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq4_nl": (32, 18),
}
"""Numbers of weights and of bytes per block, by scheme of GGUF blocks."""

_STORAGE_BY_SCHEME: dict[QuantScheme, tuple[list[torch.dtype], tuple[int, int]]] = {
    "plain": ([torch.float32, torch.bfloat16, torch.float16], (1, 1)),
    "int8": ([torch.int8], (1, 1)),
    "e4m3": ([torch.float8_e4m3fn], (1, 1)),
    "int4": ([torch.uint8], (2, 1)),
    "e2m1": ([torch.uint8], (2, 1)),
    **{scheme: ([torch.uint8], sizes) for scheme, sizes in GGUF_BLOCK_SIZES.items()},
}
"""Dtypes that ``values`` may have, and (number of weights, number of stored values) in the smallest
unit: ``(2, 1)`` is two weights in one byte."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Shape and quantisation of a linear layer's weights, without their values.

    ``TorchOps.accepts_weights`` tells from a WeightSpec whether an op set can use the weights.

    Attributes:
        shape: ``(out, in)``.
        scheme, scale_block: see ``LinearWeights``.
        has_zeros, has_column_order: whether there are ``zeros`` and a ``column_order``.
    """

    shape: tuple[int, int]
    scheme: QuantScheme = "plain"
    scale_block: tuple[int, int] | None = None
    has_zeros: bool = False
    has_column_order: bool = False


class PanelSource(Protocol):
    """Source of one parameter's weights in the native kernels' layout, such as a packed file."""

    def pack(self, context: Any, weights: LinearWeights) -> Any:
        """Returns the PackedWeights of a linear layer, which belong to ``context``.

        Called once for each linear layer of the parameter, in order; each expert counts as one.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """Weight ``[out, in]`` and bias of a linear layer.

    With a scheme of integers or small floats, an element is ``(value - zero) * scale``. A block of
    ``scale_block`` rows and columns has one ``scale`` and one ``zero``: ``(1, in)`` is a block per
    output channel, ``(1, 128)`` a block per 128 columns of a row, ``(128, 128)`` a block per tile.
    A scheme of ``GGUF_BLOCK_SIZES`` has everything in ``values``: the blocks of a GGUF file.

    Attributes:
        values: ``[out, in]``; for 4-bit schemes ``[out, in / 2]`` uint8, with even columns in the
            low bits; for blocks ``[out, bytes of a row]`` uint8.
        bias: ``[out]``.
        scheme: element type of ``values``; "plain" is a floating point type of torch.
        scales: ``[ceil(out / rows), ceil(in / columns)]`` for a ``scale_block`` of (rows, columns).
        zeros: of the shape of ``scales``; None means 0.
        column_order: ``[in]``, index of the input that each column multiplies; None means the
            column's own index.
        is_tied: whether a tied embedding reads ``values`` as well. The values then stay in memory
            beside a packed copy.
        panels: source of the weights in the native kernels' layout; None if they have yet to be
            packed. If the source holds packed weights, the tensors above are on the meta device.
        next_parts: weights of the same layer in other schemes or block sizes; their outputs follow
            those of ``values``. ``bias`` covers all outputs, and ``panels`` packs all parts, one
            after the other.

    Raises:
        ModelLoadError: a dtype or shape contradicts the scheme.
    """

    values: Tensor
    bias: Tensor | None = None
    scheme: QuantScheme = "plain"
    scales: Tensor | None = None
    scale_block: tuple[int, int] | None = None
    zeros: Tensor | None = None
    column_order: Tensor | None = None
    is_tied: bool = False
    panels: PanelSource | None = None
    next_parts: tuple[LinearWeights, ...] = ()

    def __post_init__(self) -> None:
        self._require_field(
            "scheme", self.scheme, _STORAGE_BY_SCHEME, self.scheme in _STORAGE_BY_SCHEME
        )
        dtypes, _ = _STORAGE_BY_SCHEME[self.scheme]
        self._require_field(
            "dtype of values", self.values.dtype, dtypes, self.values.dtype in dtypes
        )
        self._require_field("dimensions of values", self.values.dim(), 2, self.values.dim() == 2)
        width, whole = self.values.shape[1], _STORAGE_BY_SCHEME[self.scheme][1][1]
        self._require_field(
            "columns of values", width, f"a multiple of {whole}", width % whole == 0
        )
        columns, rows = self.shape[1], len(self.values)
        block, grid, order = self.scale_block, None, None
        if self.scheme == "plain" or self.scheme in GGUF_BLOCK_SIZES:
            self._require_field("scale_block", block, None, block is None)
        else:
            block = block or (0, 0)
            self._require_field("scale_block", self.scale_block, "(rows, columns)", min(block) > 0)
            grid, order = (-(-rows // block[0]), -(-columns // block[1])), (columns,)
            self._require_field("scales", None, grid, self.scales is not None)
        shapes = {"bias": self.shape[:1], "scales": grid, "zeros": grid, "column_order": order}
        for name, shape in shapes.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                self._require_field(
                    f"shape of {name}", tuple(tensor.shape), shape, tensor.shape == shape
                )

    def _require_field(self, field: str, value: object, expected: object, is_valid: bool) -> None:
        if not is_valid:
            choices = expected if isinstance(expected, (dict, list)) else [expected]
            raise ModelLoadError(
                f"weights of scheme {self.scheme!r}: {field} is {value}, expected "
                + " or ".join(map(str, choices))
            )

    def with_quantised_values(
        self, scheme: QuantScheme, values: Tensor, scales: Tensor, columns_per_scale: int,
        zeros: Tensor | None = None,
    ) -> LinearWeights:  # fmt: skip
        """Returns the quantised form of plain weights.

        Args:
            columns_per_scale: number of columns of a row that share a scale.
        """
        return replace(
            self,
            values=values,
            scheme=scheme,
            scales=scales,
            scale_block=(1, columns_per_scale),
            zeros=zeros,
        )

    @property
    def spec(self) -> WeightSpec:
        zeros, order = self.zeros is not None, self.column_order is not None
        return WeightSpec(self.shape, self.scheme, self.scale_block, zeros, order)

    @property
    def num_bytes(self) -> int:
        """Bytes of values, scales and zeros."""
        tensors = (self.values, self.scales, self.zeros)
        return sum(each.nbytes for each in tensors if each is not None) + sum(
            part.num_bytes for part in self.next_parts
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight matrix, ``(out, in)``."""
        rows, width = self.values.shape
        weights, values = _STORAGE_BY_SCHEME[self.scheme][1]
        return rows + sum(part.shape[0] for part in self.next_parts), width // values * weights

    @property
    def single_scheme_parts(self) -> list[LinearWeights]:
        """The weights split into parts of one scheme each, with their parts of the bias."""
        if not self.next_parts:
            return [self]
        parts = [replace(self, bias=None, next_parts=()), *self.next_parts]
        sizes = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if self.bias is None else self.bias.split(sizes)
        return [
            replace(part, bias=bias, panels=self.panels)
            for part, bias in zip(parts, biases, strict=True)
        ]


def join_weights(parts: Sequence[LinearWeights]) -> LinearWeights:
    """Weights whose outputs are the concatenated outputs of ``parts``."""
    first, *others = parts
    if not others:
        return first
    biases = [part.bias for part in parts if part.bias is not None]
    below = tuple(replace(part, bias=None) for part in others)
    return replace(
        replace(first, bias=None), next_parts=below, bias=torch.cat(biases) if biases else None
    )
