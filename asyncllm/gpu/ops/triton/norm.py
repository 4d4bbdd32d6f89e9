"""TritonRMSNorm, TritonGatedNorm: norms, with a residual addition before or a gate after them."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.operands import row_stride
from asyncllm.gpu.ops.triton.tuning import next_power_of_2, row_warps


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
    """Norms a row; grid ``(rows,)``.

    With ADD, the sum ``residual + x`` is normed, and replaces the residual. With SCALED, x is
    multiplied by ``multiplier`` first. With SUM_SCALED, the rounded sum is multiplied by
    ``sum_scale``. The normed values are rounded before the multiplication by a weight of x's dtype,
    but after the multiplication by a float32 weight.
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
        # Norm the rounded sum, which is what the next layer reads as its residual.
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
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019), in float32.

    Rows have to be contiguous and may have up to 65536 elements.

    Args:
        weight: ``[H]``, of the dtype of ``x`` or float32.
        multiplier: factor on ``x`` in ``add``.
        scale: factor on the rounded sum in ``add``.

    Raises:
        ValueError: in a call, rows are not as long as the weight, or not contiguous.
    """

    def __init__(
        self, weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> None:
        self.weight, self.eps = weight, eps
        self.multiplier, self.scale = multiplier, scale

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x [T, H]``, or of each part of ``x [T, parts, H]``."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        return self._launch(rows, rows, out).view(x.shape)

    def norm_in_place(self, x: Tensor) -> None:
        """Replaces ``x [T, H]`` by its norm."""
        self._launch(x, x, x)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``norm(sum)`` and ``sum = scale * (multiplier * x + residual)``.

        The sum replaces ``residual``.
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._launch(x, residual, out, add=True), residual

    def _launch(self, x: Tensor, residual: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        rows, width = x.shape
        if width != len(self.weight):
            raise ValueError(f"rows of {width} elements: expected {len(self.weight)}")
        if rows:
            norm_kernel[(rows,)](
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
                WIDTH=width,
                BLOCK=next_power_of_2(width),
                ADD=add,
                SCALED=add and self.multiplier != 1.0,
                SUM_SCALED=add and self.scale != 1.0,
                num_warps=row_warps(width),
            )
        return out


@triton.jit
def gated_norm_kernel(
    out,
    x,
    gate,
    weight,
    eps,
    stride_x,
    stride_gate,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norms a head and multiplies it by SiLU of its gate; grid ``(rows, heads)``."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    at = head * SIZE + columns
    value = tl.load(x + row * stride_x + at, mask=real, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    # Round before and after the multiplication by the weight, as TorchGatedNorm does.
    scale = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    normed = normed.to(out.dtype.element_ty).to(tl.float32) * scale
    z = tl.load(gate + row * stride_gate + at, mask=real, other=0.0).to(tl.float32)
    gated = normed.to(out.dtype.element_ty).to(tl.float32) * (z / (1.0 + tl.exp(-z)))
    tl.store(out + row * HEADS * SIZE + at, gated.to(out.dtype.element_ty), mask=real)


class TritonGatedNorm:
    """``GatedNorm`` by a Triton kernel.

    Args:
        weight: ``[D]``, applied to each head.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        (rows, width), size = x.shape, len(self.weight)
        out = x.new_empty((rows, width))
        if rows:
            gated_norm_kernel[(rows, width // size)](
                out, x, gate, self.weight, self.eps, row_stride("x", x), row_stride("gate", gate),
                HEADS=width // size, SIZE=size, BLOCK=next_power_of_2(size),
                num_warps=row_warps(size),
            )  # fmt: skip
        return out
