"""Program: a step's native ops, which one call runs without the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncllm.native.context import Context, fail
from asyncllm.native.interface import STRUCTS, Op

INVALID = 1
"""``STATUS_INVALID`` of the interface."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``x [T, N]`` with contiguous rows, copied where they are not.

    Raises:
        ValueError: another dtype than ``dtype``, or a device other than the CPU.
    """
    if x.dtype != dtype or x.device.type != "cpu":
        raise ValueError(f"native ops: {x.dtype} on {x.device}, expected {dtype} on cpu")
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def parameter(x: Tensor) -> Tensor:
    """Returns a layer's parameter as contiguous memory, whose address ops may hold.

    Raises:
        ValueError: another device, or a dtype that no op reads.
    """
    if x.dtype not in DTYPES or x.device.type != "cpu":
        raise ValueError(f"native ops: a parameter of {x.dtype} on {x.device}")
    return x.contiguous()


def _writes(name: str, op: Any) -> bool:
    """Whether an op is the last of its layer to write the KV cache or recurrent states.

    An op that only rotates queries has no cache.
    """
    return name == "gated_delta" or (name == "rope_and_cache" and op.args.rope_and_cache.cache)


class Program:
    """Ops, with the addresses of their operands and the memory behind these.

    Args:
        ops: array of ``Op``.
        names: names of the ops.
        capacity: rows of the buffers of each Size.
        num_bytes: bytes of the activations.
        results: tensors that a run leaves behind, with room for the largest step.
        held: objects whose memory the ops point at.
    """

    def __init__(
        self, context: Context, ops: ctypes.Array[Any], names: Sequence[str],
        capacity: Sequence[int], num_bytes: int, results: Sequence[Tensor],
        held: Sequence[object],
    ) -> None:  # fmt: skip
        self.context, self.names, self.num_bytes = context, tuple(names), num_bytes
        self.results = tuple(results)
        self._held = (ops, *held)
        writes = [index for index, name in enumerate(names) if _writes(name, ops[index])]
        sizes = ctypes.c_int64 * len(capacity)
        self.args = STRUCTS["Program"](
            ops=ops,
            num_ops=len(names),
            op_bytes=ctypes.sizeof(Op),
            num_writing_ops=max(writes, default=-1) + 1,
            capacity=sizes(*capacity),
        )
        self._sizes, self._failed = sizes(), (ctypes.c_int64 * 1)()

    def run(self, *sizes: int) -> None:
        """Runs a step of these sizes, in the order of Size, on the context's threads.

        Raises:
            RuntimeError: sizes or indices beyond the buffers; the message names the op.
            MemoryError: scratch memory could not be allocated.
        """
        self._sizes[:] = sizes
        context = self.context
        status = context.functions.run(context.handle, self.args, self._sizes, self._failed)
        if status:
            fail(self.failure(status, self._failed[0], self._sizes), status)

    def failure(self, status: int, at: int, sizes: Iterable[int]) -> str:
        """Describes the failed part of a run: the op at index ``at``, the step's sizes, or the
        call."""
        if at >= 0:
            return f"step, op {at}, {self.names[at]}"
        if status != INVALID:
            return "step"
        found, room = list(sizes), list(self.args.capacity)
        return (
            f"step, {found} rows, tokens, wanted, sampled and greedy where there is room for {room}"
        )
