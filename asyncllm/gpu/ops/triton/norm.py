"""RMSNorm, alone and fused with the residual addition before it."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker takes a kernel for the function that it is written as.

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.tuning import next_power_of_2, row_warps


@triton.jit
def norm_kernel(
    out,
    x,
    residual,
    weight,
    eps,
    stride_out,
    stride_x,
    stride_residual,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Grid ``(rows,)``. With ADD the sum replaces the residual."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < WIDTH
    value = tl.load(x + row * stride_x + columns, mask=real, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * stride_residual + columns
        value += tl.load(at, mask=real, other=0.0).to(tl.float32)
        # The norm sees the sum that the next layer will read.
        rounded = value.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=real)
        value = rounded.to(tl.float32)
    scale = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    # Rounded to the model's dtype before the weight, as in Llama.
    result = normed.to(x.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + row * stride_out + columns, result.to(out.dtype.element_ty), mask=real)


class TritonRMSNorm:
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019).

    Computed in float32; rows of up to 65536 elements, contiguous.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x [T, H]``."""
        return self._launch(x, x, add=False)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum, which replaces ``residual``."""
        return self._launch(x, residual, add=True), residual

    def _launch(self, x: Tensor, residual: Tensor, *, add: bool) -> Tensor:
        rows, width = x.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if rows:
            norm_kernel[(rows,)](
                out,
                x,
                residual,
                self.weight,
                self.eps,
                out.stride(0),
                x.stride(0),
                residual.stride(0),
                WIDTH=width,
                BLOCK=next_power_of_2(width),
                ADD=add,
                num_warps=row_warps(width),
            )
        return out
