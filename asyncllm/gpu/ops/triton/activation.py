"""The activation of the gate times the up projection; the soft cap of logits."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker takes a kernel for the function that it is written as.

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.launcher import launched
from asyncllm.gpu.ops.triton.tuning import cdiv

BLOCK = 1024


@launched
@triton.jit
def gated_mul_kernel(
    out, gate_up, width, stride_out, stride_in, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid ``(rows, blocks of width)``. SiLU, or with GELU that by tanh: x times the logistic
    function of ``2 * sqrt(2 / pi) * (x + 0.044715 * x ** 3)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    gate_at = gate_up + row * stride_in + columns
    gate = tl.load(gate_at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=real, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # Rounded between the two, as the reference is.
    activated = (gate / (1.0 + tl.exp(-inner))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * stride_out + columns, (activated * up).to(out.dtype.element_ty), mask=real)


def gated_mul(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """``[T, 2 * I] -> [T, I]``: the activation of the first half times the second."""
    rows, double = gate_up.shape
    width = double // 2
    out = gate_up.new_empty((rows, width))
    if rows:
        gated_mul_kernel[(rows, cdiv(width, BLOCK))](
            out, gate_up, width, out.stride(0), gate_up.stride(0), GELU=gelu, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    return out


silu_mul = partial(gated_mul, gelu=False)
gelu_mul = partial(gated_mul, gelu=True)


@launched
@triton.jit
def softcap_kernel(x, width, cap, stride, BLOCK: tl.constexpr):
    """Grid ``(rows, blocks of width)``: ``cap * tanh(x / cap)``, in place."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    at = x + row * stride + columns
    value = tl.load(at, mask=real, other=0.0).to(tl.float32) / cap
    capped = cap * (1.0 - 2.0 / (tl.exp(2.0 * value) + 1.0))
    tl.store(at, capped.to(x.dtype.element_ty), mask=real)


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` of ``x [S, N]``, in float32 and in place."""
    rows, width = x.shape
    if rows:
        softcap_kernel[(rows, cdiv(width, BLOCK))](
            x, width, cap, x.stride(0), BLOCK=BLOCK, num_warps=4
        )
    return x
