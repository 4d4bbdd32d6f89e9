"""NativeOp: one op of the native library, which a call runs or records."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.ops.recorder import DynamicSize
from asyncllm.native.context import NativeContext, raise_for_status
from asyncllm.native.interface import NUM_STEP_SIZES, OP_KINDS, STRUCTS, Op

NO_ROW_LIMIT = 2**63 - 1
"""Capacity of a program whose number of rows is not limited by buffers."""

_ROWS, _TOKENS = DynamicSize.ROWS.value, DynamicSize.TOKENS.value


class NativeOp:
    """An op of the native library: a program of one op, with its arguments in memory.

    Only one thread at a time may use it, as with its context.

    Args:
        name: the op's name in OP_KINDS.
        keep_alive: objects that own the memory behind addresses in ``constants``.
        constants: the arguments that are the same in each call. A tensor or array is passed by its
            address, and kept alive.

    Attributes:
        args: ctypes structure of the op's arguments. A call sets the pointers to its tensors.
    """

    def __init__(
        self, context: NativeContext, name: str, keep_alive: Sequence[object] = (), **constants: Any
    ) -> None:
        self.context, self.name, self._keep_alive = context, name, (*keep_alive, constants)
        ops = (Op * 1)()
        ops[0].kind, ops[0].size, ops[0].x_size = OP_KINDS.index(name), DynamicSize.TOKENS, -1
        self.args = getattr(ops[0].args, name)
        for field, value in constants.items():
            setattr(self.args, field, _address(value))
        self._program = STRUCTS["Program"](
            ops=ops,
            num_ops=1,
            op_bytes=ctypes.sizeof(Op),
            num_writing_ops=1,
            capacity=(NO_ROW_LIMIT,) * NUM_STEP_SIZES,
        )
        self._sizes = (ctypes.c_int64 * NUM_STEP_SIZES)()
        self._failed_op_index = (ctypes.c_int64 * 1)()

    def check_shape(self, name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
        """Raises ValueError for a tensor of another shape than ``expected``.

        With another shape the op would read or write out of bounds.
        """
        if tensor.shape != expected:
            raise ValueError(
                f"native {self.name}: {name} is {tuple(tensor.shape)}, expected {tuple(expected)}"
            )

    def empty_output(self, like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocates an output ``[T, width]`` with the T and, by default, the dtype of ``like``."""
        if (recorder := self.context.recorder) is not None:
            return recorder.empty_output(like, width, dtype)
        return like.new_empty((like.shape[0], width), dtype=dtype)

    def __call__(
        self,
        like: Tensor,
        tensors: Mapping[str, Tensor],
        keep_alive: Sequence[object] = (),
        num_rows: int = 0,
    ) -> None:
        """Runs the op for the T rows of ``like``, or records it.

        Args:
            tensors: the step's tensors that the op reads and writes, by the names of the arguments
                that point to them.
            keep_alive: objects that own the memory behind other pointers of this call.
            num_rows: number of sequences in the step, for an op that works sequence by sequence.

        Raises:
            RuntimeError: shapes, strides or indices that the library does not accept.
            MemoryError: scratch memory could not be allocated.
        """
        context, args = self.context, self.args
        if (recorder := context.recorder) is not None:
            recorder.add_op(self.name, like, args, tensors, [*self._keep_alive, *keep_alive])
            return
        for pointer, tensor in tensors.items():
            setattr(args, pointer, tensor.data_ptr())
        sizes = self._sizes
        sizes[_ROWS], sizes[_TOKENS] = num_rows, like.shape[0]
        status = context.functions.run(context.handle, self._program, sizes, self._failed_op_index)
        if status:
            raise_for_status(self.name, status)


def _address(value: Any) -> Any:
    """Address of a tensor or array; any other value itself."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value.ctypes.data if isinstance(value, np.ndarray) else value
