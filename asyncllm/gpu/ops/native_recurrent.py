"""NativeCausalConv, NativeGatedDelta, NativeGatedNorm: the ops of recurrent layers in C++."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.gated_delta import DecayParameters
from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.program import DTYPE_CODES, contiguous_rows
from asyncllm.native.context import NativeContext


class NativeStateRows:
    """A step's rows, in arrays at fixed addresses that a recorded step reads when it runs."""

    def __init__(self, step: StepInputs) -> None:
        rows = step.host
        assert rows is not None  # Steps on a CPU always have a host copy of their rows.
        arrays = rows.req_indices, rows.starts, rows.query_start_loc
        self.arrays = [np.ascontiguousarray(array, np.int64) for array in arrays]
        self.count, self.num_tokens = len(rows.starts), step.num_tokens

    def set_args(self, args: Any, state: Tensor) -> None:
        """Sets an op's ``StateRows`` arguments, for ``state [num_slots, ...]``."""
        args.lines, args.starts, args.query_start = (each.ctypes.data for each in self.arrays)
        args.num_slots = len(state)


def _check_state(op: NativeOp, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ValueError unless the op can write ``state [num_slots, *shape]`` in place."""
    if state.shape[1:] != shape or state.dtype != dtype or not state.is_contiguous():
        raise ValueError(
            f"native {op.name}: states {tuple(state.shape)} of {state.dtype}, expected "
            f"{('slots', *shape)} of {dtype}, contiguous"
        )


class NativeCausalConv:
    """``CausalConv`` in C++."""

    def __init__(self, context: NativeContext, weight: Tensor) -> None:
        weight = weight.float().T.contiguous()
        self.width, self.channels = weight.shape
        self._op = NativeOp(
            context, "causal_conv", weight=weight, channels=self.channels, width=self.width
        )

    def __call__(self, x: Tensor, state: Tensor, rows: NativeStateRows) -> Tensor:
        x, op = contiguous_rows(x, x.dtype), self._op
        op.check_shape("x", x, (len(x), self.channels))
        _check_state(op, state, (self.width - 1, self.channels), x.dtype)
        args, out = op.args, op.empty_output(x, self.channels)
        rows.set_args(args.rows, state)
        args.x_stride, args.state, args.dtype = x.stride(0), state.data_ptr(), DTYPE_CODES[x.dtype]
        op(x, {"x": x, "out": out}, [state, rows], rows.count)
        return out


class NativeGatedDelta:
    """``GatedDelta`` in C++, token by token: how a prompt is chunked does not change the result."""

    def __init__(
        self,
        context: NativeContext,
        shape: LinearAttentionConfig,
        decay_parameters: DecayParameters,
    ) -> None:
        self.shape = shape
        self._op = NativeOp(
            context, "gated_delta", dt_bias=decay_parameters.dt_bias.float().contiguous(),
            log_rate=decay_parameters.log_rate.float().contiguous(),
            key_heads=shape.num_key_heads, value_heads=shape.num_value_heads,
            key_dim=shape.key_dim, value_dim=shape.value_dim,
        )  # fmt: skip

    def __call__(self, qkv: Tensor, gates: Tensor, state: Tensor, rows: NativeStateRows) -> Tensor:
        shape, op = self.shape, self._op
        qkv, gates = contiguous_rows(qkv, qkv.dtype), contiguous_rows(gates, qkv.dtype)
        op.check_shape("qkv", qkv, (len(qkv), shape.conv_channels))
        op.check_shape("gates", gates, (len(qkv), 2 * shape.num_value_heads))
        matrix = (shape.num_value_heads, shape.key_dim, shape.value_dim)
        _check_state(op, state, matrix, torch.float32)
        args, out = op.args, op.empty_output(qkv, shape.total_value_dim)
        rows.set_args(args.rows, state)
        args.qkv_stride, args.gates_stride = qkv.stride(0), gates.stride(0)
        args.state, args.dtype = state.data_ptr(), DTYPE_CODES[qkv.dtype]
        op(qkv, {"qkv": qkv, "gates": gates, "out": out}, [state, rows], rows.count)
        return out


class NativeGatedNorm:
    """``GatedNorm`` in C++.

    Args:
        weight: ``[D]``, applied to each head.
    """

    def __init__(self, context: NativeContext, weight: Tensor, eps: float) -> None:
        self.weight = weight.contiguous()
        dtype = DTYPE_CODES[weight.dtype]
        self._op = NativeOp(
            context, "gated_norm", weight=self.weight, head_size=len(weight), eps=eps, dtype=dtype
        )

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        weight, size, op = self.weight, len(self.weight), self._op
        x, gate = contiguous_rows(x, weight.dtype), contiguous_rows(gate, weight.dtype)
        args, out = op.args, op.empty_output(x, x.shape[1])
        args.x_stride, args.gate_stride = x.stride(0), gate.stride(0)
        args.heads = x.shape[1] // size
        op.check_shape("x", x, (len(x), args.heads * size))
        op.check_shape("gate", gate, x.shape)
        op(x, {"x": x, "gate": gate, "out": out})
        return out
