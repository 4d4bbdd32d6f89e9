"""NativeGatedMul, NativeSigmoidMul, NativeSoftcap: pointwise ops in C++."""

from __future__ import annotations

from torch import Tensor

from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.program import DTYPE_CODES, contiguous_rows
from asyncllm.native.context import NativeContext

SILU, GELU_TANH = 0, 1
"""Values of ``enum Activation`` in ``native/src/interface.h``."""


class NativeGatedMul:
    """``TorchOps.silu_mul`` or ``TorchOps.gelu_mul`` in C++.

    Args:
        activation: SILU or GELU_TANH.
    """

    def __init__(self, context: NativeContext, activation: int) -> None:
        self._op = NativeOp(context, "gated_mul", activation=activation)

    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        gate, op = contiguous_rows(gate, gate.dtype), self._op
        width = gate.shape[1]
        if up is None:
            width //= 2
            up = gate[:, width:]
        else:
            up = contiguous_rows(up, gate.dtype)
            op.check_shape("up", up, gate.shape)
        args, out = op.args, op.empty_output(gate, width)
        args.gate_stride, args.up_stride = gate.stride(0), up.stride(0)
        args.width, args.dtype = width, DTYPE_CODES[gate.dtype]
        op(gate, {"gate": gate, "up": up, "out": out})
        return out


class NativeSigmoidMul:
    """``TorchOps.sigmoid_mul`` in C++."""

    def __init__(self, context: NativeContext) -> None:
        self._op = NativeOp(context, "sigmoid_mul")

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate, op = contiguous_rows(x, x.dtype), contiguous_rows(gate, x.dtype), self._op
        op.check_shape("gate", gate, x.shape)
        args, width = op.args, x.shape[1]
        args.x_stride, args.gate_stride = x.stride(0), gate.stride(0)
        args.width, args.dtype = width, DTYPE_CODES[x.dtype]
        out = op.empty_output(x, width)
        op(x, {"x": x, "gate": gate, "out": out})
        return out


class NativeSoftcap:
    """``TorchOps.softcap`` in C++: ``cap * tanh(x / cap)``, in place."""

    def __init__(self, context: NativeContext) -> None:
        self._op = NativeOp(context, "softcap")

    def __call__(self, x: Tensor, cap: float) -> Tensor:
        if x.stride(1) != 1 or x.device.type != "cpu":
            raise ValueError(f"native softcap: x has strides {x.stride()} on {x.device}")
        args = self._op.args
        args.stride, args.width, args.cap = x.stride(0), x.shape[1], cap
        args.dtype = DTYPE_CODES[x.dtype]
        self._op(x, {"x": x})
        return x
