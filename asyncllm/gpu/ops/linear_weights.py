"""LinearWeights: the weight of a linear layer, between checkpoint formats and op sets.

Every checkpoint format is read into it, and every op set packs from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncllm.errors import ModelLoadError

QuantScheme = Literal["plain", "int8", "e4m3", "int4", "e2m1"]

_STORAGE: dict[QuantScheme, tuple[list[torch.dtype], int]] = {
    "plain": ([torch.float32, torch.bfloat16, torch.float16], 1),
    "int8": ([torch.int8], 1),
    "e4m3": ([torch.float8_e4m3fn], 1),
    "int4": ([torch.uint8], 2),
    "e2m1": ([torch.uint8], 2),
}
"""By scheme, accepted dtypes of ``values``, and weights per stored value."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The layout of a linear layer's weights, without their values.

    By it an op set says whether it can compute with the weights unchanged.

    Attributes:
        shape: ``(out, in)``.
        scheme, scale_block: see ``LinearWeights``.
        has_zeros, has_order: whether there are ``zeros`` and a ``column_order``.
    """

    shape: tuple[int, int]
    scheme: QuantScheme = "plain"
    scale_block: tuple[int, int] | None = None
    has_zeros: bool = False
    has_order: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """Weight ``[out, in]`` and bias of a linear layer.

    With a scheme other than "plain", an element is ``(value - zero) * scale``, where ``scale``
    and ``zero`` are those of its block of ``scale_block`` rows and columns: ``(1, in)`` is one
    per output channel, ``(1, 128)`` one per group of columns, ``(128, 128)`` one per tile.

    Attributes:
        values: ``[out, in]``; for 4 bits ``[out, in / 2]`` uint8, even columns in the low half.
        bias: ``[out]``.
        scheme: element type of ``values``; "plain" is a floating point type of torch.
        scales: ``[ceil(out / rows), ceil(in / columns)]`` by ``scale_block``.
        zeros: as ``scales``; None is 0.
        column_order: ``[in]``, the input that each column multiplies; None is its own index.
        shared: a tied embedding reads ``values`` as well, so that a packed copy would not replace
            them.

    Raises:
        ModelLoadError: dtypes or shapes that contradict the scheme.
    """

    values: Tensor
    bias: Tensor | None = None
    scheme: QuantScheme = "plain"
    scales: Tensor | None = None
    scale_block: tuple[int, int] | None = None
    zeros: Tensor | None = None
    column_order: Tensor | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        self._expect("scheme", self.scheme, _STORAGE, self.scheme in _STORAGE)
        dtypes, _ = _STORAGE[self.scheme]
        self._expect("dtype of values", self.values.dtype, dtypes, self.values.dtype in dtypes)
        self._expect("dimensions of values", self.values.dim(), 2, self.values.dim() == 2)
        rows, columns = self.shape
        block, grid, order = self.scale_block, None, None
        if self.scheme == "plain":
            self._expect("scale_block", block, None, block is None)
        else:
            block = block or (0, 0)
            self._expect("scale_block", self.scale_block, "(rows, columns)", min(block) > 0)
            grid, order = (-(-rows // block[0]), -(-columns // block[1])), (columns,)
            self._expect("scales", None, grid, self.scales is not None)
        shapes = {"bias": (rows,), "scales": grid, "zeros": grid, "column_order": order}
        for name, shape in shapes.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                self._expect(f"shape of {name}", tuple(tensor.shape), shape, tensor.shape == shape)

    def _expect(self, field: str, found: object, accepted: object, met: bool) -> None:
        if not met:
            choices = accepted if isinstance(accepted, (dict, list)) else [accepted]
            raise ModelLoadError(
                f"weights of scheme {self.scheme!r}: {field} is {found}, expected "
                + " or ".join(map(str, choices))
            )

    @property
    def form(self) -> WeightForm:
        zeros, order = self.zeros is not None, self.column_order is not None
        return WeightForm(self.shape, self.scheme, self.scale_block, zeros, order)

    @property
    def num_bytes(self) -> int:
        """Bytes of values, scales and zeros."""
        parts = (self.values, self.scales, self.zeros)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        rows, width = self.values.shape
        return rows, width * _STORAGE[self.scheme][1]
