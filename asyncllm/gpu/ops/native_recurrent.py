"""The ops of recurrent layers in compiled code."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.gated_delta import DeltaBiases
from asyncllm.gpu.ops.program import DTYPES, rows_of
from asyncllm.native.context import Context, fail
from asyncllm.native.interface import ARGS, ConvArgs, DeltaArgs, StateRowsArgs


class NativeStateRows:
    """A step's rows as arrays at fixed addresses; a recorded step reads them when it runs."""

    def __init__(self, step: StepInputs) -> None:
        rows = step.host
        assert rows is not None  # the host knows every row of a step on a CPU
        arrays = rows.req_indices, rows.starts, rows.query_start_loc
        self.arrays = [np.ascontiguousarray(array, np.int64) for array in arrays]
        self.count, self.num_tokens = len(rows.starts), step.num_tokens

    def args(self, state: Tensor) -> StateRowsArgs:
        """Arguments for an op on ``state``, which has all slots."""
        addresses = (array.ctypes.data for array in self.arrays)
        return StateRowsArgs(*addresses, self.count, self.num_tokens, len(state))


def _check(op: str, x: Tensor, width: int) -> None:
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"native {op}: x is {tuple(x.shape)}, expected {width} columns")


def _check_state(op: str, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ValueError for states that cannot be written in place."""
    if state.shape[1:] != shape or state.dtype != dtype or not state.is_contiguous():
        raise ValueError(
            f"native {op}: states {tuple(state.shape)} of {state.dtype}, expected "
            f"{('slots', *shape)} of {dtype}, contiguous"
        )


def _run(
    context: Context, name: str, args: Any, x: Tensor, tensors: dict[str, Tensor], width: int,
    holds: list[object], *sizes: int,
) -> Tensor:  # fmt: skip
    """Calls an op, or records it.

    Args:
        tensors: the op's tensors, x among them, by the names of their arguments.

    Returns:
        The op's output ``[T, width]``, its argument ``out``.
    """
    if (recorder := context.recorder) is not None:
        out = recorder.empty(x, width)
        recorder.add(name, x, args, tensors | {"out": out}, holds)
        return out
    out = x.new_empty((len(x), width))
    for pointer, tensor in (tensors | {"out": out}).items():
        setattr(args, pointer, tensor.data_ptr())
    status = getattr(context.functions, name)(context.handle, ctypes.byref(args), *sizes)
    if status:
        fail(name, status)
    return out


class NativeCausalConv:
    """The convolution of ``TorchCausalConv`` in compiled code."""

    def __init__(self, context: Context, weight: Tensor) -> None:
        self.context, self.weight = context, weight.float().T.contiguous()

    def __call__(self, x: Tensor, state: Tensor, rows: NativeStateRows) -> Tensor:
        x, (width, channels) = rows_of(x, x.dtype), self.weight.shape
        _check("causal_conv", x, channels)
        _check_state("causal_conv", state, (width - 1, channels), x.dtype)
        args = ConvArgs(
            rows=rows.args(state), x_stride=x.stride(0), weight=self.weight.data_ptr(),
            state=state.data_ptr(), channels=channels, width=width, dtype=DTYPES[x.dtype],
        )  # fmt: skip
        holds = [self.weight, state, rows]
        return _run(self.context, "causal_conv", args, x, {"x": x}, channels, holds)


class NativeGatedDelta:
    """The gated delta rule, token by token, so that chunks of any size give the same bits."""

    def __init__(self, context: Context, shape: LinearAttentionConfig, biases: DeltaBiases) -> None:
        self.context, self.shape = context, shape
        self.biases = tuple(each.float().contiguous() for each in (biases.dt_bias, biases.log_rate))

    def __call__(self, qkv: Tensor, gates: Tensor, state: Tensor, rows: NativeStateRows) -> Tensor:
        shape, (dt_bias, log_rate) = self.shape, self.biases
        qkv, gates = rows_of(qkv, qkv.dtype), rows_of(gates, qkv.dtype)
        _check("gated_delta", qkv, shape.conv_size)
        _check("gated_delta", gates, 2 * shape.num_value_heads)
        matrix = (shape.num_value_heads, shape.key_dim, shape.value_dim)
        _check_state("gated_delta", state, matrix, torch.float32)
        args = DeltaArgs(
            rows=rows.args(state), qkv_stride=qkv.stride(0), gates_stride=gates.stride(0),
            dt_bias=dt_bias.data_ptr(), log_rate=log_rate.data_ptr(), state=state.data_ptr(),
            key_heads=shape.num_key_heads, value_heads=shape.num_value_heads,
            key_dim=shape.key_dim, value_dim=shape.value_dim, dtype=DTYPES[qkv.dtype],
        )  # fmt: skip
        tensors, holds = {"qkv": qkv, "gates": gates}, [self.biases, state, rows]
        return _run(self.context, "gated_delta", args, qkv, tensors, shape.value_size, holds)


class NativeGatedNorm:
    """The norm of ``TorchGatedNorm`` in compiled code.

    Args:
        weight: ``[D]``, the weight of one head.
    """

    def __init__(self, context: Context, weight: Tensor, eps: float) -> None:
        self.context, self.weight, self.eps = context, weight.contiguous(), eps

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        weight, size = self.weight, len(self.weight)
        x, gate = rows_of(x, weight.dtype), rows_of(gate, weight.dtype)
        if x.shape != gate.shape or x.shape[1] % size:
            raise ValueError(
                f"native gated_norm: x is {tuple(x.shape)} and its gate {tuple(gate.shape)}, "
                f"expected two of one shape, and of heads of {size}"
            )
        args = ARGS["gated_norm"](
            x_stride=x.stride(0), gate_stride=gate.stride(0), weight=weight.data_ptr(),
            heads=x.shape[1] // size, head_size=size, eps=self.eps, dtype=DTYPES[x.dtype],
        )  # fmt: skip
        tensors, width = {"x": x, "gate": gate}, x.shape[1]
        return _run(self.context, "gated_norm", args, x, tensors, width, [weight], len(x))


class NativeSigmoidMul:
    """``TorchOps.sigmoid_mul`` in compiled code."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = rows_of(x, x.dtype), rows_of(gate, x.dtype)
        if x.shape != gate.shape:
            raise ValueError(
                f"native sigmoid_mul: x is {tuple(x.shape)} and its gate {tuple(gate.shape)}"
            )
        args = ARGS["sigmoid_mul"](
            x_stride=x.stride(0), gate_stride=gate.stride(0), width=x.shape[1],
            dtype=DTYPES[x.dtype],
        )  # fmt: skip
        tensors = {"x": x, "gate": gate}
        return _run(self.context, "sigmoid_mul", args, x, tensors, x.shape[1], [], len(x))
