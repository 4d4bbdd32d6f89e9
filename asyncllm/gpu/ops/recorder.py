"""Recorder: a trace of the model's step, from one run of its layers on fake tensors.

Fake tensors have a few rows. While its context has a recorder, a native op adds itself to that
instead of computing; of torch's ops only views and the selection of rows by an index are allowed.
The result is a ``Program``: the ops with their addresses, over buffers that have room for the
largest step and share memory where they are not needed at the same time.
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
    """A step contains work without a native op, which the message names."""


class Size(IntEnum):
    """First dimensions of tensors whose size varies by step; ``Size`` of the interface."""

    ROWS = 0
    TOKENS = 1
    WANTED = 2
    SAMPLED = 3
    GREEDY = 4


FAKE_SIZES = {Size.ROWS: 2, Size.TOKENS: 11, Size.WANTED: 8, Size.SAMPLED: 3, Size.GREEDY: 4}
"""Rows of a fake tensor, by which its Size is recognised. The WANTED tokens are those whose hidden
states are returned; sampled and greedy ones are among them."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer of the program, and the memory of its fake tensor.

    Attributes:
        row_bytes: bytes of a row.
        memory: memory of the fake tensor, held so that no two have one address.
        address: address of ``memory``.
        array: the real memory of an input; None for an activation, which ``layout`` places.
        first, last: first and last op that use it.
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
    """A recorded op; its pointers are buffers and byte offsets into their first row."""

    name: str
    size: Size
    x_size: int
    args: ctypes.Structure
    pointers: dict[str, tuple[_Buffer, int]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records the ops that run while it is active.

    Raises:
        Unrecordable: a layer calls an op of torch, or uses a tensor that no native op made.
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
        """Keeps torch from wrapping this mode for torch.compile, which never sees it.

        The wrapper would import the compiler at its first call, some two seconds of every start.
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
            return self._record_selection(args[0], args[1][0])
        if func.is_view:
            return func(*args, **(kwargs or {}))
        raise Unrecordable(f"{func} has no native kernel")

    # --- called while recording --------------------------------------------------------

    def given(self, array: np.ndarray, size: Size) -> Tensor:
        """Makes the fake tensor of ``array``, into which a step's inputs are written."""
        fake = np.zeros(FAKE_SIZES[size], dtype=array.dtype)
        insort(self._buffers, _Buffer(size, array.itemsize, fake, array), key=_address)
        self._held.append(array)
        return torch.from_numpy(fake)

    def empty(self, like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Makes a fake output ``[T, width]`` of the Size, and by default the dtype, of ``like``."""
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
            like: the Size of the op's output, or a tensor of that Size.
            args: the op's arguments, all set but the pointers to ``tensors``; a copy is kept.
            tensors: the step's tensors that it reads and writes, by the names of their pointers.
            holds: objects behind the other pointers, to be kept alive.
            x_size: the Size of input ``x``, for an op that selects rows of it.
        """
        size = like if isinstance(like, Size) else self._size_of(like)
        own = type(args).from_buffer_copy(args)
        op = _RecordedOp(name, size, x_size, own)
        for pointer, tensor in tensors.items():
            # The library skips the rows with logits, whose number varies by step, when it runs.
            skipped = FAKE_SIZES[Size.SAMPLED] if (name, pointer) == ("argmax", "x") else 0
            place = op.pointers[pointer] = self._find_buffer(name, tensor, skipped)
            place[0].last = len(self._ops)
        self._ops.append(op)
        self._held += holds

    def keep(self, tensor: Tensor) -> None:
        """Makes a tensor a result of the program, which is kept after a run."""
        buffer, _ = self._find_buffer("result", tensor)
        self._results.append((buffer, tensor.dtype, tensor.shape[1]))

    def refuse_call(self) -> NoReturn:
        """Raises Unrecordable; called for a native op that cannot be recorded."""
        raise Unrecordable("a native op cannot be recorded")

    def _record_selection(self, x: Tensor, index: Tensor) -> Tensor:
        """Records the selection of rows of ``x`` by a step's index."""
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

    def _find_buffer(self, name: str, tensor: Tensor, skipped: int = 0) -> tuple[_Buffer, int]:
        """The buffer that a tensor views, and its offset in bytes after ``skipped`` rows."""
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
        """Places the activations: first byte by the buffer's id, and the bytes of all."""
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
        """Makes the program, over buffers of ``capacity`` rows of each Size.

        Raises:
            MemoryError: the activations cannot be allocated.
        """
        places, total = self.layout(capacity)
        # The operating system backs zeros with memory only where they are touched.
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
