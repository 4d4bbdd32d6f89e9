"""TritonGatedNorm: the per-head gated norm of ``gpu/ops/gated_norm.py``."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# To a type checker, a Triton kernel is a plain Python function, without ``kernel[grid]``.

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.launcher import with_launcher
from asyncllm.gpu.ops.triton.operands import row_stride
from asyncllm.gpu.ops.triton.tuning import next_power_of_2, row_warps


@with_launcher
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
