"""Recorder: traces the model's step into a program, by running the layers on fake tensors.

Fake tensors are small CPU tensors of a few rows. While the native context has a recorder, a native
op adds itself to the recorder instead of computing. Of torch's own ops only views and the selection
of rows by an index are allowed. The result is a ``Program``: the ops, with addresses in buffers
that are as large as the largest step needs. Buffers that are not in use at the same time may
overlap.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncllm.gpu.ops.buffer_layout import Lifetime, lay_out_buffers
from asyncllm.gpu.ops.program import DTYPE_CODES, Program
from asyncllm.native.context import NativeContext
from asyncllm.native.interface import OP_ARG_STRUCTS, OP_KINDS, Op

ALIGNMENT_BYTES = 64


class UnrecordableError(Exception):
    """Error for a step with an op that is not native; the message names the op."""


class DynamicSize(IntEnum):
    """Sizes of a first dimension that vary by step; ``enum Size`` in ``native/src/interface.h``.

    OUTPUT_TOKENS counts the tokens whose hidden states are returned; SAMPLED_TOKENS, those of them
    that get logits; GREEDY_TOKENS, those that get only the index of the largest logit.
    """

    ROWS = 0
    TOKENS = 1
    OUTPUT_TOKENS = 2
    SAMPLED_TOKENS = 3
    GREEDY_TOKENS = 4


FAKE_ROW_COUNTS = {
    DynamicSize.ROWS: 2,
    DynamicSize.TOKENS: 11,
    DynamicSize.OUTPUT_TOKENS: 8,
    DynamicSize.SAMPLED_TOKENS: 3,
    DynamicSize.GREEDY_TOKENS: 4,
}
"""Numbers of rows of fake tensors, all different, so that a shape identifies its DynamicSize."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer of a recorded program, and the memory of its fake tensor.

    Attributes:
        row_bytes: bytes of a row.
        memory: memory of the fake tensor, held so that no other fake tensor gets its address.
        address: address of ``memory``.
        array: memory of an input in the program; None for an activation, whose memory
            ``place_activations`` chooses.
        first_op, last_op: indices of the first and the last op that use the buffer.
    """

    size: DynamicSize
    row_bytes: int
    memory: np.ndarray
    array: np.ndarray | None
    first_op: int = 0
    last_op: int = 0
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.memory.ctypes.data


def _buffer_address(buffer: _Buffer) -> int:
    return buffer.address


@dataclass(slots=True)
class _RecordedOp:
    """A recorded op. Each of ``pointers`` is a buffer and a byte offset within a row of it."""

    name: str
    size: DynamicSize
    x_size: int
    args: ctypes.Structure
    pointers: dict[str, tuple[_Buffer, int]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the native ops that are called while it is active.

    Raises:
        UnrecordableError: a layer calls another op of torch, or uses a tensor that is neither an
            input nor the result of a recorded op.
    """

    def __init__(self, context: NativeContext) -> None:
        super().__init__()
        self.context = context
        self._ops: list[_RecordedOp] = []
        self._buffers: list[_Buffer] = []
        self._keep_alive: list[object] = []
        self._results: list[tuple[_Buffer, torch.dtype, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from wrapping this mode for torch.compile, which is not used here.

        The wrapper would import the compiler at its first call, which takes some two seconds.
        """
        return False

    def __enter__(self) -> Recorder:
        self.context.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.context.recorder = None

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.index.Tensor and len(args[1]) == 1:
            return self._record_index_select(args[0], args[1][0])
        if func.is_view:
            return func(*args, **(kwargs or {}))
        raise UnrecordableError(f"{func} has no native kernel")

    # --- called while recording --------------------------------------------------------

    def add_input(self, array: np.ndarray, size: DynamicSize) -> Tensor:
        """Makes ``array`` an input of the program; returns its fake tensor."""
        fake = np.zeros(FAKE_ROW_COUNTS[size], dtype=array.dtype)
        insort(self._buffers, _Buffer(size, array.itemsize, fake, array), key=_buffer_address)
        self._keep_alive.append(array)
        return torch.from_numpy(fake)

    def empty_output(self, like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Makes a fake output ``[T, width]`` with the T and, by default, the dtype of ``like``."""
        size, dtype = self._dynamic_size_of(like), dtype or like.dtype
        row_bytes = width * dtype.itemsize
        memory = np.zeros(FAKE_ROW_COUNTS[size] * row_bytes, dtype=np.uint8)
        first = len(self._ops)
        insort(
            self._buffers, _Buffer(size, row_bytes, memory, None, first, first), key=_buffer_address
        )
        return torch.from_numpy(memory).view(dtype).view(-1, width)

    def add_op(
        self,
        name: str,
        like: Tensor | DynamicSize,
        args: ctypes.Structure,
        tensors: Mapping[str, Tensor],
        keep_alive: Sequence[object] = (),
        x_size: int = -1,
    ) -> None:
        """Records an op.

        Args:
            like: the DynamicSize of the op's output, or a tensor of that DynamicSize.
            args: the op's arguments, which are copied. The pointers to ``tensors`` need not be set
                yet.
            tensors: the step's tensors that the op reads and writes, by the names of the arguments
                that point to them.
            keep_alive: objects that own the memory behind the other pointers.
            x_size: the DynamicSize of the input ``x``, for an op that selects rows of ``x``.
        """
        size = like if isinstance(like, DynamicSize) else self._dynamic_size_of(like)
        copied_args = type(args).from_buffer_copy(args)
        op = _RecordedOp(name, size, x_size, copied_args)
        for pointer, tensor in tensors.items():
            # The library itself skips the first SAMPLED_TOKENS rows of x, because their number
            # varies by step.
            skipped_rows = 0
            if (name, pointer) == ("argmax", "x"):
                skipped_rows = FAKE_ROW_COUNTS[DynamicSize.SAMPLED_TOKENS]
            location = op.pointers[pointer] = self._find_buffer(name, tensor, skipped_rows)
            location[0].last_op = len(self._ops)
        self._ops.append(op)
        self._keep_alive += keep_alive

    def keep_result(self, tensor: Tensor) -> None:
        """Makes a tensor a result of the program; no other buffer reuses its memory."""
        buffer, _ = self._find_buffer("result", tensor)
        self._results.append((buffer, tensor.dtype, tensor.shape[1]))

    def raise_unrecordable(self) -> NoReturn:
        """Raises UnrecordableError; NativeContext calls it for an op that cannot be recorded."""
        raise UnrecordableError("a native op cannot be recorded")

    def _record_index_select(self, x: Tensor, index: Tensor) -> Tensor:
        """Records ``x[index]``, which selects rows of ``x``, as the native op "select"."""
        if index.dtype != torch.int64 or x.dim() != 2 or x.stride(1) != 1:
            raise UnrecordableError("an index other than one of rows has no native kernel")
        out = self.empty_output(index, x.shape[1], x.dtype)
        args = OP_ARG_STRUCTS["select"](
            x_stride=x.stride(0), width=x.shape[1], scale=1.0, dtype=DTYPE_CODES[x.dtype]
        )
        tensors = {"x": x, "ids": index, "out": out}
        self.add_op("select", index, args, tensors, x_size=self._dynamic_size_of(x))
        return out

    def _dynamic_size_of(self, tensor: Tensor) -> DynamicSize:
        for size, rows in FAKE_ROW_COUNTS.items():
            if tensor.dim() and tensor.shape[0] == rows:
                return size
        raise UnrecordableError(f"a tensor {tuple(tensor.shape)} does not have the step's tokens")

    def _find_buffer(self, name: str, tensor: Tensor, skipped_rows: int = 0) -> tuple[_Buffer, int]:
        """Finds the buffer that contains a tensor, and the tensor's byte offset in it.

        Args:
            skipped_rows: number of leading rows of the buffer that the op itself skips. The tensor
                has to start in the row after them, and the offset is counted from that row.

        Raises:
            UnrecordableError: no buffer contains the tensor, or it starts in another row.
        """
        address = tensor.data_ptr()
        index = bisect_right(self._buffers, address, key=_buffer_address) - 1
        buffer = self._buffers[index] if index >= 0 else None
        if buffer is None or address >= buffer.address + buffer.memory.nbytes:
            raise UnrecordableError(f"{name} reads a tensor that no native op made")
        offset, rows = address - buffer.address, FAKE_ROW_COUNTS[buffer.size]
        offset -= skipped_rows * buffer.row_bytes
        adjacent = tensor.stride(0) * tensor.itemsize == buffer.row_bytes
        if not 0 <= offset < buffer.row_bytes or tensor.shape[0] > rows or not adjacent:
            raise UnrecordableError(f"{name} reads some rows of a tensor")
        return buffer, offset

    # --- the program -------------------------------------------------------------------

    def place_activations(self, capacity: Sequence[int]) -> tuple[dict[int, int], int]:
        """Places activations in one allocation; returns the buffers' offsets by ``id(buffer)``, and
        the allocation's size, in bytes."""
        result_ids = {id(buffer) for buffer, *_ in self._results}
        activations = [buffer for buffer in self._buffers if buffer.array is None]
        lifetimes = [
            Lifetime(
                max(1, capacity[buffer.size]) * buffer.row_bytes,
                buffer.first_op,
                len(self._ops) if id(buffer) in result_ids else buffer.last_op,
            )
            for buffer in activations
        ]
        starts, total = lay_out_buffers(lifetimes, ALIGNMENT_BYTES)
        return dict(zip(map(id, activations), starts, strict=True)), total

    def make_program(self, capacity: Sequence[int]) -> Program:
        """Makes the program. A buffer of DynamicSize s gets ``capacity[s]`` rows.

        Raises:
            MemoryError: the activations cannot be allocated.
        """
        offsets, total = self.place_activations(capacity)
        # The operating system commits memory to a page of zeros only when it is first written.
        memory = np.zeros(total + ALIGNMENT_BYTES, dtype=np.uint8)
        base = -memory.ctypes.data % ALIGNMENT_BYTES

        def address(buffer: _Buffer) -> int:
            if buffer.array is not None:
                return buffer.array.ctypes.data
            return memory.ctypes.data + base + offsets[id(buffer)]

        ops = (Op * len(self._ops))()
        for op, recorded in zip(ops, self._ops, strict=True):
            for pointer, (buffer, row_offset) in recorded.pointers.items():
                setattr(recorded.args, pointer, address(buffer) + row_offset)
            op.kind, op.size = OP_KINDS.index(recorded.name), recorded.size
            op.x_size = recorded.x_size
            setattr(op.args, recorded.name, recorded.args)
        results: list[Tensor] = []
        for buffer, dtype, width in self._results:
            first = base + offsets[id(buffer)]
            rows = memory[first : first + capacity[buffer.size] * buffer.row_bytes]
            results.append(torch.from_numpy(rows).view(dtype).view(-1, width))
        names = [recorded.name for recorded in self._ops]
        keep_alive = (*self._keep_alive, memory)
        return Program(self.context, ops, names, capacity, total, results, keep_alive)
