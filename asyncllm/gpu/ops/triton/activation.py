"""Gated activations, multiplication by a sigmoid, and the soft cap of logits."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# To a type checker, a Triton kernel is a plain Python function, without ``kernel[grid]``.

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.launcher import with_launcher
from asyncllm.gpu.ops.triton.operands import row_stride
from asyncllm.gpu.ops.triton.tuning import cdiv

BLOCK = 1024


@triton.jit
def activate_gate(x, GELU: tl.constexpr):
    """SiLU of x; with GELU the tanh approximation of GELU of x.

    The approximation is ``x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x ** 3))``.
    """
    inner = x
    if GELU:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-inner))


@with_launcher
@triton.jit
def gated_mul_kernel(
    out,
    gates,
    ups,
    width,
    stride_out,
    stride_gates,
    stride_ups,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiplies the activated gates by the ups; grid ``(rows, blocks of width)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    gate = tl.load(gates + row * stride_gates + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(ups + row * stride_ups + columns, mask=real, other=0.0).to(tl.float32)
    # Round before the product, as TorchOps does.
    value = activate_gate(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * stride_out + columns, (value * up).to(out.dtype.element_ty), mask=real)


def gated_mul(gate_up: Tensor, up: Tensor | None = None, *, gelu: bool) -> Tensor:
    """``[T, 2 * I] -> [T, I]``: the activated first half times the second half.

    With ``up [T, I]``, ``gate_up`` is the gate ``[T, I]`` alone.
    """
    width = gate_up.shape[1] if up is not None else gate_up.shape[1] // 2
    gate, up = (gate_up, up) if up is not None else (gate_up, gate_up[:, width:])
    rows, out = len(gate), gate.new_empty((len(gate), width))
    if rows:
        gated_mul_kernel[(rows, cdiv(width, BLOCK))](
            out, gate, up, width, out.stride(0), row_stride("gate", gate), row_stride("up", up),
            GELU=gelu, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


silu_mul = partial(gated_mul, gelu=False)
gelu_mul = partial(gated_mul, gelu=True)


@with_launcher
@triton.jit
def sigmoid_mul_kernel(out, x, gate, width, stride_x, stride_gate, BLOCK: tl.constexpr):
    """Multiplies x by the sigmoid of gate; grid ``(rows, blocks of width)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    value = tl.load(x + row * stride_x + columns, mask=real, other=0.0).to(tl.float32)
    logit = tl.load(gate + row * stride_gate + columns, mask=real, other=0.0).to(tl.float32)
    # Round before the product, as TorchOps does.
    factor = (1.0 / (1.0 + tl.exp(-logit))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + columns, (value * factor).to(out.dtype.element_ty), mask=real)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Multiplies ``x [T, N]`` by the sigmoid of ``gate [T, N]``."""
    rows, width = x.shape
    out = x.new_empty((rows, width))
    if rows:
        sigmoid_mul_kernel[(rows, cdiv(width, BLOCK))](
            out,
            x,
            gate,
            width,
            row_stride("x", x),
            row_stride("gate", gate),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


@with_launcher
@triton.jit
def softcap_kernel(x, width, cap, stride, BLOCK: tl.constexpr):
    """``cap * tanh(x / cap)`` in place; grid ``(rows, blocks of width)``."""
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
            x, width, cap, row_stride("x", x), BLOCK=BLOCK, num_warps=4
        )
    return x
