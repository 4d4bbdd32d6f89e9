"""Recorder: a trace of the model's step, from one run of its layers on fake tensors.

Fake tensors have a few rows. An op of the native op set writes itself into the recorder of its
context instead of computing; torch may do nothing but make views and pick rows by an index. The
result is a ``Program``: the ops with their addresses, over buffers that have room for the largest
step and are shared by values that are not needed at the same time.
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

from asyncllm.gpu.ops.buffer_layout import Lifetime, lay_out
from asyncllm.gpu.ops.program import DTYPES, Program
from asyncllm.native.context import Context
from asyncllm.native.interface import ARGS, OP_KINDS, Op

ALIGNMENT = 64


class Unrecordable(Exception):
    """The model does something in a step that no native op does; the message says what."""


class Size(IntEnum):
    """First dimensions whose size a step decides, as ``Size`` of the interface."""

    ROWS = 0
    TOKENS = 1
    WANTED = 2
    SAMPLED = 3
    GREEDY = 4


FAKE_SIZES = {Size.ROWS: 2, Size.TOKENS: 11, Size.WANTED: 8, Size.SAMPLED: 3, Size.GREEDY: 4}
"""Rows of a fake tensor, which tell its Size; wanted rows hold the sampled and greedy ones."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer of the program, and the memory of its fake tensor.

    Attributes:
        row_bytes: of a row.
        memory: of the fake tensor, held so that no two have one address.
        address: of that memory.
        array: the real memory where it has an address of its own; None lies with the activations.
        first, last: the ops between which it is in use.
    """

    size: Size
    row_bytes: int
    memory: np.ndarray
    array: np.ndarray | None
    first: int = 0
    last: int = 0
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.memory.ctypes.data


def _address(buffer: _Buffer) -> int:
    return buffer.address


@dataclass(slots=True)
class _RecordedOp:
    """An op whose pointers are buffers and bytes into their first row."""

    name: str
    size: Size
    x_size: int
    args: ctypes.Structure
    pointers: dict[str, tuple[_Buffer, int]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records the ops that run while it is active.

    Raises:
        Unrecordable: from within the layers, for an op of torch, or a tensor that no op made.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self._ops: list[_RecordedOp] = []
        self._buffers: list[_Buffer] = []
        self._held: list[object] = []
        self._results: list[tuple[_Buffer, torch.dtype, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's hook. Wrapped to be skipped by torch.compile, which never sees it, the first call
        would import the compiler: some two seconds of every start."""
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
            return self._select(args[0], args[1][0])
        if func.is_view:
            return func(*args, **(kwargs or {}))
        raise Unrecordable(f"{func} has no native kernel")

    # --- what ops say ------------------------------------------------------------------

    def given(self, array: np.ndarray, size: Size) -> Tensor:
        """The fake tensor of ``array``, into which the step's inputs are written."""
        fake = np.zeros(FAKE_SIZES[size], dtype=array.dtype)
        insort(self._buffers, _Buffer(size, array.itemsize, fake, array), key=_address)
        self._held.append(array)
        return torch.from_numpy(fake)

    def empty(self, like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """An output ``[T, width]``, of the size and, unless given, the dtype of ``like``."""
        size, dtype = self._size_of(like), dtype or like.dtype
        row_bytes = width * dtype.itemsize
        memory = np.zeros(FAKE_SIZES[size] * row_bytes, dtype=np.uint8)
        at = len(self._ops)
        insort(self._buffers, _Buffer(size, row_bytes, memory, None, at, at), key=_address)
        return torch.from_numpy(memory).view(dtype).view(-1, width)

    def add(
        self,
        name: str,
        like: Tensor | Size,
        args: ctypes.Structure,
        tensors: Mapping[str, Tensor],
        holds: Sequence[object] = (),
        x_size: int = -1,
    ) -> None:
        """Records an op.

        Args:
            like: has the size of its output.
            args: whose pointers are set but those to ``tensors``; a copy is kept.
            tensors: by the names of their pointers, what it reads and writes of the step.
            holds: what the other pointers point at.
        """
        size = like if isinstance(like, Size) else self._size_of(like)
        own = type(args).from_buffer_copy(args)
        op = _RecordedOp(name, size, x_size, own)
        for pointer, tensor in tensors.items():
            # The program itself begins behind the rows with logits, of which a step has any number.
            skipped = FAKE_SIZES[Size.SAMPLED] if (name, pointer) == ("argmax", "x") else 0
            place = op.pointers[pointer] = self._find(name, tensor, skipped)
            place[0].last = len(self._ops)
        self._ops.append(op)
        self._held += holds

    def keep(self, tensor: Tensor) -> None:
        """Makes a tensor one of the program's results, which outlive its run."""
        buffer, _ = self._find("result", tensor)
        self._results.append((buffer, tensor.dtype, tensor.shape[1]))

    def refuse_call(self) -> NoReturn:
        """Called for an op that would compute now, and not write itself down."""
        raise Unrecordable("a native op cannot be recorded")

    def _select(self, x: Tensor, index: Tensor) -> Tensor:
        """The rows of x that an index of the step names."""
        if index.dtype != torch.int64 or x.dim() != 2 or x.stride(1) != 1:
            raise Unrecordable("an index other than one of rows has no native kernel")
        out = self.empty(index, x.shape[1], x.dtype)
        args = ARGS["select"](
            x_stride=x.stride(0), width=x.shape[1], scale=1.0, dtype=DTYPES[x.dtype]
        )
        tensors = {"x": x, "ids": index, "out": out}
        self.add("select", index, args, tensors, x_size=self._size_of(x))
        return out

    def _size_of(self, tensor: Tensor) -> Size:
        for size, rows in FAKE_SIZES.items():
            if tensor.dim() and tensor.shape[0] == rows:
                return size
        raise Unrecordable(f"a tensor {tuple(tensor.shape)} does not have the step's tokens")

    def _find(self, name: str, tensor: Tensor, skipped: int = 0) -> tuple[_Buffer, int]:
        """The buffer that a tensor is a view of, from its first row on or behind ``skipped``."""
        at = tensor.data_ptr()
        index = bisect_right(self._buffers, at, key=_address) - 1
        buffer = self._buffers[index] if index >= 0 else None
        if buffer is None or at >= buffer.address + buffer.memory.nbytes:
            raise Unrecordable(f"{name} reads a tensor that no native op made")
        offset, rows = at - buffer.address, FAKE_SIZES[buffer.size]
        offset -= skipped * buffer.row_bytes
        adjacent = tensor.stride(0) * tensor.itemsize == buffer.row_bytes
        if not 0 <= offset < buffer.row_bytes or tensor.shape[0] > rows or not adjacent:
            raise Unrecordable(f"{name} reads some rows of a tensor")
        return buffer, offset

    # --- the program -------------------------------------------------------------------

    def layout(self, capacity: Sequence[int]) -> tuple[dict[int, int], int]:
        """Where activations lie: by the buffer's id its first byte, and the bytes of all."""
        kept = {id(buffer) for buffer, *_ in self._results}
        own = [buffer for buffer in self._buffers if buffer.array is None]
        lifetimes = [
            Lifetime(
                max(1, capacity[buffer.size]) * buffer.row_bytes,
                buffer.first,
                len(self._ops) if id(buffer) in kept else buffer.last,
            )
            for buffer in own
        ]
        starts, total = lay_out(lifetimes, ALIGNMENT)
        return dict(zip(map(id, own), starts, strict=True)), total

    def finish(self, capacity: Sequence[int]) -> Program:
        """The program, over buffers of so many rows of each Size.

        Raises:
            MemoryError: its activations cannot be allocated.
        """
        places, total = self.layout(capacity)
        # The operating system backs it with memory where it is first touched.
        memory = np.zeros(total + ALIGNMENT, dtype=np.uint8)
        base = -memory.ctypes.data % ALIGNMENT

        def address(buffer: _Buffer) -> int:
            if buffer.array is not None:
                return buffer.array.ctypes.data
            return memory.ctypes.data + base + places[id(buffer)]

        ops = (Op * len(self._ops))()
        for op, recorded in zip(ops, self._ops, strict=True):
            for pointer, (buffer, offset) in recorded.pointers.items():
                setattr(recorded.args, pointer, address(buffer) + offset)
            op.kind, op.size = OP_KINDS.index(recorded.name), recorded.size
            op.x_size = recorded.x_size
            setattr(op.args, recorded.name, recorded.args)
        results: list[Tensor] = []
        for buffer, dtype, width in self._results:
            first = base + places[id(buffer)]
            rows = memory[first : first + capacity[buffer.size] * buffer.row_bytes]
            results.append(torch.from_numpy(rows).view(dtype).view(-1, width))
        names = [recorded.name for recorded in self._ops]
        held = (*self._held, memory)
        return Program(self.context, ops, names, capacity, total, results, held)
