"""Gated activations, multiplication by a sigmoid, and the soft cap of logits."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.operands import row_stride
from asyncllm.gpu.ops.triton.tuning import cdiv

ELEMENTS_PER_BLOCK = tl.constexpr(1024)


@triton.jit
def activate_gate(x, ACTIVATION: tl.constexpr):
    """SiLU, GELU or sigmoid of x, as ACTIVATION says: "silu", "gelu" or "sigmoid".

    GELU is its tanh approximation, ``x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x ** 3))``.
    """
    inner = x
    if ACTIVATION == "gelu":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    if ACTIVATION == "sigmoid":
        result = 1.0 / (1.0 + tl.exp(-inner))
    else:
        result = x / (1.0 + tl.exp(-inner))
    return result


@triton.jit
def gated_mul_kernel(
    out,
    gates,
    ups,
    width,
    stride_out,
    stride_gates,
    stride_ups,
    ACTIVATION: tl.constexpr,
):
    """Multiplies activated gates by the up projections; grid ``(rows, blocks of width)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * ELEMENTS_PER_BLOCK + tl.arange(0, ELEMENTS_PER_BLOCK)
    real = columns < width
    gate = tl.load(gates + row * stride_gates + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(ups + row * stride_ups + columns, mask=real, other=0.0).to(tl.float32)
    # Round before the product, as TorchOps does.
    value = activate_gate(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * stride_out + columns, (value * up).to(out.dtype.element_ty), mask=real)


def gated_mul(gate: Tensor, up: Tensor | None = None, *, activation: str) -> Tensor:
    """``activation(gate) * up``, ``[T, I]``; arguments as in ``TorchOps.silu_mul``."""
    width = gate.shape[1] if up is not None else gate.shape[1] // 2
    up = gate[:, width:] if up is None else up
    rows, out = len(gate), up.new_empty((len(gate), width))
    if rows:
        gated_mul_kernel[(rows, cdiv(width, ELEMENTS_PER_BLOCK.value))](
            out, gate, up, width, out.stride(0), row_stride("gate", gate), row_stride("up", up),
            ACTIVATION=activation, num_warps=4,
        )  # fmt: skip
    return out


silu_mul = partial(gated_mul, activation="silu")
gelu_mul = partial(gated_mul, activation="gelu")


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Multiplies ``x [T, N]`` by the sigmoid of ``gate [T, N]``."""
    return gated_mul(gate, x, activation="sigmoid")


@triton.jit
def softcap_kernel(x, width, cap, stride):
    """``cap * tanh(x / cap)`` in place; grid ``(rows, blocks of width)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * ELEMENTS_PER_BLOCK + tl.arange(0, ELEMENTS_PER_BLOCK)
    real = columns < width
    at = x + row * stride + columns
    value = tl.load(at, mask=real, other=0.0).to(tl.float32) / cap
    capped = cap * (1.0 - 2.0 / (tl.exp(2.0 * value) + 1.0))
    tl.store(at, capped.to(x.dtype.element_ty), mask=real)


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` of ``x [S, N]``, in float32 and in place."""
    rows, width = x.shape
    if rows:
        softcap_kernel[(rows, cdiv(width, ELEMENTS_PER_BLOCK.value))](
            x, width, cap, row_stride("x", x), num_warps=4
        )
    return x
