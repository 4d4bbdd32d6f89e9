"""SiLU of the gate times the up projection."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker takes a kernel for the function that it is written as.

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.tuning import cdiv

BLOCK = 1024


@triton.jit
def silu_mul_kernel(out, gate_up, width, stride_out, stride_in, BLOCK: tl.constexpr):
    """Grid ``(rows, blocks of width)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    gate_at = gate_up + row * stride_in + columns
    gate = tl.load(gate_at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=real, other=0.0).to(tl.float32)
    # Rounded between the two, as the reference is.
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * stride_out + columns, (activated * up).to(out.dtype.element_ty), mask=real)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``[T, 2 * I] -> [T, I]``: SiLU of the first half times the second."""
    rows, double = gate_up.shape
    width = double // 2
    out = gate_up.new_empty((rows, width))
    if rows:
        silu_mul_kernel[(rows, cdiv(width, BLOCK))](
            out, gate_up, width, out.stride(0), gate_up.stride(0), BLOCK=BLOCK, num_warps=4
        )
    return out
