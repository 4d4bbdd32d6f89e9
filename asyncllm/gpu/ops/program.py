"""Program: the native ops of a step, which one call runs without the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from asyncllm.native.context import NativeContext, raise_for_status
from asyncllm.native.interface import STRUCTS, Op

STATUS_INVALID = 1
"""Value of ``STATUS_INVALID`` in ``native/src/interface.h``."""

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Values of ``enum DType`` in ``native/src/interface.h``."""


def contiguous_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``x [T, N]``, or a copy if its rows are not contiguous.

    Raises:
        ValueError: ``x`` is not of ``dtype``, or not on the CPU.
    """
    if x.dtype != dtype or x.device.type != "cpu":
        raise ValueError(f"native ops: {x.dtype} on {x.device}, expected {dtype} on cpu")
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def contiguous_parameter(parameter: Tensor) -> Tensor:
    """Returns a layer's parameter in contiguous memory, whose address ops may store.

    Raises:
        ValueError: the parameter is not on the CPU, or of a dtype that no op reads.
    """
    if parameter.dtype not in DTYPE_CODES or parameter.device.type != "cpu":
        raise ValueError(f"native ops: a parameter of {parameter.dtype} on {parameter.device}")
    return parameter.contiguous()


def _writes_state(name: str, op: Any) -> bool:
    """Whether an op writes the KV cache, or completes the recurrent states of its layer.

    A "rope_and_cache" op with a null cache only rotates queries.
    """
    return name == "gated_delta" or (name == "rope_and_cache" and op.args.rope_and_cache.cache)


class Program:
    """Ops with the addresses of their operands, and the memory at these addresses.

    Args:
        ops: array of ``Op``.
        names: names of the ops.
        capacity: for each DynamicSize, the number of rows that its buffers have room for.
        num_bytes: bytes of the activations.
        results: tensors that contain the results after a run, with rows for the largest step.
        keep_alive: owners of the memory to which the ops point; the program keeps them alive.
    """

    def __init__(
        self, context: NativeContext, ops: ctypes.Array[Any], names: Sequence[str],
        capacity: Sequence[int], num_bytes: int, results: Sequence[Tensor],
        keep_alive: Sequence[object],
    ) -> None:  # fmt: skip
        self.context, self.names, self.num_bytes = context, tuple(names), num_bytes
        self.results = tuple(results)
        self._keep_alive = (ops, *keep_alive)
        writes = [index for index, name in enumerate(names) if _writes_state(name, ops[index])]
        sizes = ctypes.c_int64 * len(capacity)
        self.args = STRUCTS["Program"](
            ops=ops,
            num_ops=len(names),
            op_bytes=ctypes.sizeof(Op),
            num_writing_ops=max(writes, default=-1) + 1,
            capacity=sizes(*capacity),
        )

    def raise_failure(self, status: int, op_index: int, sizes: Iterable[int]) -> NoReturn:
        """Raises the error of a failed run.

        Args:
            op_index: index of the failed op; -1 if a size is invalid.
            sizes: sizes of the run, in the order of DynamicSize.

        Raises:
            RuntimeError: a size or an index is beyond the buffers; the message names the op.
            MemoryError: scratch memory could not be allocated.
        """
        where = "step"
        if op_index >= 0:
            where = f"step, op {op_index}, {self.names[op_index]}"
        elif status == STATUS_INVALID:
            where = (
                f"step, {list(sizes)} rows, tokens, outputs, sampled and greedy where there is "
                f"room for {list(self.args.capacity)}"
            )
        raise_for_status(where, status)
