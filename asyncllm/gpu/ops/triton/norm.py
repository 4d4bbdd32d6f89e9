"""RMSNorm, alone and fused with the residual addition before it."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker sees a kernel as the Python function that it is written as.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.launcher import launched
from asyncllm.gpu.ops.triton.operands import row_stride
from asyncllm.gpu.ops.triton.tuning import next_power_of_2, row_warps


@launched
@triton.jit
def norm_kernel(
    out,
    x,
    residual,
    weight,
    eps,
    multiplier,
    sum_scale,
    stride_out,
    stride_x,
    stride_residual,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    SUM_SCALED: tl.constexpr,
):
    """The norm of a row; grid ``(rows,)``.

    With ADD it is the norm of ``residual + x``, and the sum replaces the residual. SCALED takes
    ``multiplier * x`` for x, and SUM_SCALED multiplies the rounded sum by ``sum_scale``. The norm
    is rounded after a float32 weight, but before a weight of x's dtype.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < WIDTH
    value = tl.load(x + row * stride_x + columns, mask=real, other=0.0).to(tl.float32)
    if SCALED:
        value = (value * multiplier).to(x.dtype.element_ty).to(tl.float32)
    if ADD:
        at = residual + row * stride_residual + columns
        value += tl.load(at, mask=real, other=0.0).to(tl.float32)
        # The norm sees the sum that the next layer will read.
        rounded = value.to(residual.dtype.element_ty)
        if SUM_SCALED:
            rounded = (rounded.to(tl.float32) * sum_scale).to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=real)
        value = rounded.to(tl.float32)
    scale = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    if weight.dtype.element_ty != tl.float32:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    result = normed * scale
    tl.store(out + row * stride_out + columns, result.to(out.dtype.element_ty), mask=real)


class TritonRMSNorm:
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019).

    Computed in float32; rows of up to 65536 elements, contiguous.

    Args:
        weight: has the dtype of ``x``, or float32.
        multiplier: factor on ``x`` in ``add``.
        scale: factor on the rounded sum in ``add``.

    Raises:
        ValueError: a call has rows that are not as long as the weight, or not contiguous.
    """

    def __init__(
        self, weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> None:
        self.weight = weight
        self.eps = eps
        self.multiplier, self.scale = multiplier, scale
        self._width = 0
        self._alone: Any = None
        self._adding: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x [T, H]``, or of each part of ``x [T, parts, H]``."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        return self._launch(rows, rows, out).view(x.shape)

    def in_place(self, x: Tensor) -> None:
        """Replaces ``x [T, H]`` by its norm."""
        self._launch(x, x, x)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of ``scale * (multiplier * x + residual)``, and that sum.

        The sum replaces ``residual``.
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._launch(x, residual, out, add=True), residual

    def _launch(self, x: Tensor, residual: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        rows, width = x.shape
        if rows:
            kernel = self._adding if add else self._alone
            if kernel is None or self._width != width:
                kernel = self._bind(width, add)
            kernel(
                (rows, 1, 1),
                out,
                x,
                residual,
                self.weight,
                self.eps,
                self.multiplier,
                self.scale,
                out.stride(0),
                row_stride("x", x),
                row_stride("residual", residual),
            )
        return out

    def _bind(self, width: int, add: bool) -> Any:
        """Makes the kernels for rows of ``width``; returns the one with or without a residual."""
        if len(self.weight) != width:
            raise ValueError(f"rows of {width} elements: expected {len(self.weight)}")
        self._width = width
        self._alone, self._adding = (
            norm_kernel.bind(
                WIDTH=width,
                BLOCK=next_power_of_2(width),
                ADD=adds,
                SCALED=adds and self.multiplier != 1.0,
                SUM_SCALED=adds and self.scale != 1.0,
                num_warps=row_warps(width),
            )
            for adds in (False, True)
        )
        return self._adding if add else self._alone
