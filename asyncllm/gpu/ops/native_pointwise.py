"""Native pointwise ops: residual addition, gated activations, the soft cap of logits."""

from __future__ import annotations

from torch import Tensor

from asyncllm.gpu.ops.program import DTYPES, rows_of
from asyncllm.native.context import Context, fail
from asyncllm.native.interface import ARGS

SILU, GELU_TANH = 0, 1
"""``Activation`` of the interface."""


class NativeResidualAdd:
    """Replaces the norm of a block that has none: ``add`` only adds to the residual."""

    def __init__(self, context: Context, multiplier: float = 1.0, scale: float = 1.0) -> None:
        self.context, self.multiplier, self.scale = context, multiplier, scale

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = rows_of(x, x.dtype), rows_of(residual, x.dtype)
        if x.shape != residual.shape:
            raise ValueError(f"native add: x is {tuple(x.shape)}, expected {tuple(residual.shape)}")
        (rows, width), context = x.shape, self.context
        if (recorder := context.recorder) is not None:
            args = ARGS["add"](
                x_stride=x.stride(0), residual_stride=residual.stride(0), width=width,
                multiplier=self.multiplier, scale=self.scale, dtype=DTYPES[x.dtype],
            )  # fmt: skip
            recorder.add("add", x, args, {"x": x, "residual": residual})
            return residual, residual
        status = context.functions.add(
            context.handle, x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0),
            self.multiplier, self.scale, rows, width, DTYPES[x.dtype],
        )  # fmt: skip
        if status:
            fail("add", status)
        return residual, residual


class NativeGatedMul:
    """Activation of a row's first half times its second half, or of a row times ``up``.

    Args:
        activation: ``Activation`` of the interface.
    """

    def __init__(self, context: Context, activation: int) -> None:
        self.context, self.activation = context, activation

    def __call__(self, gate_up: Tensor, up: Tensor | None = None) -> Tensor:
        gate = rows_of(gate_up, gate_up.dtype)
        rows, width = gate.shape
        if up is None:
            width //= 2
            up = gate[:, width:]
        else:
            up = rows_of(up, gate.dtype)
            if up.shape != gate.shape:
                raise ValueError(
                    f"native gated_mul: up is {tuple(up.shape)}, expected {tuple(gate.shape)}"
                )
        context = self.context
        if (recorder := context.recorder) is not None:
            out = recorder.empty(gate, width)
            args = ARGS["gated_mul"](
                gate_stride=gate.stride(0), up_stride=up.stride(0), width=width,
                dtype=DTYPES[gate.dtype], activation=self.activation,
            )  # fmt: skip
            recorder.add("gated_mul", gate, args, {"gate": gate, "up": up, "out": out})
            return out
        out = gate.new_empty((rows, width))
        status = context.functions.gated_mul(
            context.handle, gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0),
            out.data_ptr(), rows, width, self.activation, DTYPES[gate.dtype],
        )  # fmt: skip
        if status:
            fail("gated_mul", status)
        return out


class NativeSoftcap:
    """``cap * tanh(x / cap)``, in place."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def __call__(self, x: Tensor, cap: float) -> Tensor:
        rows, width = x.shape
        if x.stride(1) != 1 or x.device.type != "cpu":
            raise ValueError(f"native softcap: x has strides {x.stride()} on {x.device}")
        context = self.context
        if (recorder := context.recorder) is not None:
            args = ARGS["softcap"](stride=x.stride(0), width=width, cap=cap, dtype=DTYPES[x.dtype])
            recorder.add("softcap", x, args, {"x": x})
            return x
        status = context.functions.softcap(
            context.handle, x.data_ptr(), x.stride(0), cap, rows, width, DTYPES[x.dtype]
        )
        if status:
            fail("softcap", status)
        return x
