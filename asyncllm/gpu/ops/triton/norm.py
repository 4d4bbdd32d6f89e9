"""TritonRMSNorm, TritonGatedNorm: norms, with a residual addition before or a gate after them."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.operands import row_stride
from asyncllm.gpu.ops.triton.tuning import num_row_warps


@triton.jit
def norm_kernel(
    out,
    x,
    residual,
    weight,
    eps,
    x_multiplier,
    sum_scale,
    stride_out,
    stride_x,
    stride_residual,
    WIDTH: tl.constexpr,
):
    """Norms a row; grid ``(rows,)``.

    Unless ``residual`` is None, the sum ``(x_multiplier * x + residual) * sum_scale`` is normed and
    replaces the residual. It is rounded after each operation, and a factor of None is left out. The
    normed values are rounded before the multiplication by a weight of x's dtype, but after the
    multiplication by a float32 weight.
    """
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < WIDTH
    value = tl.load(x + row * stride_x + columns, mask=real, other=0.0).to(tl.float32)
    if x_multiplier is not None:
        value = (value * x_multiplier).to(x.dtype.element_ty).to(tl.float32)
    if residual is not None:
        at = residual + row * stride_residual + columns
        value += tl.load(at, mask=real, other=0.0).to(tl.float32)
        # Norm the rounded sum, which is what the next layer reads as its residual.
        rounded = value.to(residual.dtype.element_ty)
        if sum_scale is not None:
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
        multiplier: factor on ``x`` in ``add_and_norm``.
        scale: factor on the rounded sum in ``add_and_norm``.

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
        return self._launch(rows, None, out).view(x.shape)

    def norm_in_place(self, x: Tensor) -> None:
        """Replaces ``x [T, H]`` by its norm."""
        self._launch(x, None, x)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``norm(sum)`` and ``sum = scale * (multiplier * x + residual)``.

        The sum replaces ``residual``.
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._launch(x, residual, out), residual

    def _launch(self, x: Tensor, residual: Tensor | None, out: Tensor) -> Tensor:
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
                None if residual is None or self.multiplier == 1.0 else self.multiplier,
                None if residual is None or self.scale == 1.0 else self.scale,
                out.stride(0),
                row_stride("x", x),
                None if residual is None else row_stride("residual", residual),
                WIDTH=width,
                num_warps=num_row_warps(width),
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
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Norms a head and multiplies it by SiLU of its gate; grid ``(rows, heads)``."""
    BLOCK: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    real = columns < HEAD_DIM
    at = head * HEAD_DIM + columns
    value = tl.load(x + row * stride_x + at, mask=real, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / HEAD_DIM + eps)
    # Round before and after the multiplication by the weight, as TorchGatedNorm does.
    scale = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    normed = normed.to(out.dtype.element_ty).to(tl.float32) * scale
    z = tl.load(gate + row * stride_gate + at, mask=real, other=0.0).to(tl.float32)
    gated = normed.to(out.dtype.element_ty).to(tl.float32) * (z / (1.0 + tl.exp(-z)))
    tl.store(out + row * NUM_HEADS * HEAD_DIM + at, gated.to(out.dtype.element_ty), mask=real)


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
                NUM_HEADS=width // size, HEAD_DIM=size, num_warps=num_row_warps(size),
            )  # fmt: skip
        return out
