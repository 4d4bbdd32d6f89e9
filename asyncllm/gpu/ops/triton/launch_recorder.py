"""LaunchRecorder: a step of the model as a LaunchProgram, from two runs of its layers.

The layers run on stand-ins, meta tensors of a few rows. A kernel's launch, a matrix product and
attention are written into the recorder instead of being run; torch may make views and empty
tensors besides. What an op is launched with may depend on the step in three ways: the grid's first
dimension is one of its sizes, so may be a number that its kernel is not specialised on, and
addresses are those of its tensors. All else has to be the same on stand-ins of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.ops.recorder import Unrecordable
from asyncllm.gpu.ops.triton.recording import (
    Always,
    Buffer,
    Count,
    Derived,
    Fixed,
    Input,
    Operand,
    RecordedAttention,
    RecordedCall,
    RecordedLaunch,
    RecordedOp,
    Recording,
    Size,
    View,
)
from asyncllm.gpu.ops.triton.state_rows import num_tiles

aten = torch.ops.aten

STAND_INS = tuple(
    (tokens, wanted, rows, num_tiles(tokens, rows))
    for tokens, wanted, rows in ((10_007, 5_003, 2_003), (20_021, 7_001, 2_011))
)
"""Sizes of each run: primes that no model has as a dimension."""


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """Stands for a step's plan of attention; ``index`` counts them."""

    recorder: LaunchRecorder
    index: int


class LaunchRecorder(TorchDispatchMode):
    """Takes down the ops that run while it is active.

    Args:
        sizes: of the stand-ins, by Size.
        capacity: tokens of the largest step.

    Raises:
        Unrecordable: from within the layers, for what a program has no op for.
    """

    def __init__(self, sizes: Sequence[int], capacity: int) -> None:
        super().__init__()
        self.recording = Recording()
        self.capacity = capacity
        self._sizes = list(sizes)
        self._has_wanted = False
        rows = self._sizes[Size.ROWS]
        self._state_rows = _stand_in(rows), _stand_in(rows + 1)
        self._has_state_rows = False
        # Storages have no identity of their own in Python: held, so that no two have one address.
        self._held: list[Tensor] = []
        self._found: dict[int, int] = {}
        self._plans = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's hook; see ``Recorder``."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        take_down = _CALLS.get(func)
        if take_down is not None:
            return take_down(self, *args, **(kwargs or {}))
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func in _EMPTY:
            return self._made(func(*args, **(kwargs or {})))
        raise Unrecordable(f"{func} cannot be recorded")

    # --- what ops say ------------------------------------------------------------------

    def given(self) -> Tensor:
        """The stand-in of an input ``[T]`` int64."""
        return self._given(_stand_in(self._sizes[Size.TOKENS]))

    def wanted(self) -> Tensor:
        """The stand-in of an input ``[E]`` int64."""
        return self._given(_stand_in(self._sizes[Size.WANTED]))

    def state_rows(self) -> tuple[Tensor, Tensor]:
        """The stand-ins of each row's slot of states ``[R]`` and first token ``[R + 1]``, int64,
        inputs behind all others."""
        if not self._has_state_rows:
            self._has_state_rows = True
            for stand_in in self._state_rows:
                self._given(stand_in)
        return self._state_rows

    def plan(self) -> RecordedPlan:
        """The stand-in of a plan of attention."""
        self._plans += 1
        return RecordedPlan(self, self._plans - 1)

    def usual_rows(self, rows: int) -> int:
        """Rows that launch shapes are chosen for where a tensor has so many: those of the largest
        step; few where they are of wanted tokens."""
        return self.capacity if self._sizes.index(rows) == Size.TOKENS else 1

    def derived(self, rows: int, rule: Callable[[int], int]) -> int:
        """The stand-in of the size that follows from such rows by the rule."""
        return self._sizes[self._derive(Derived(rule, Size(self._sizes.index(rows))))]

    def launch(
        self, bound: Any, grid: tuple[int, ...], tensors: Sequence[Tensor], numbers: tuple[Any, ...]
    ) -> None:
        """Takes down a launch."""
        operands = tuple(map(self._operand, tensors))
        x, y, z = (*grid, 1, 1)[:3]
        counted = tuple(
            Count(self._size_of(number))
            if type(number) is int and bound.varies(len(tensors) + place)
            else number
            for place, number in enumerate(numbers)
        )
        counts = [each for each in counted if isinstance(each, Count)]
        op = RecordedLaunch(bound, self._size_of(x), (y, z), operands, counted)
        self._add(op, (*operands, *counts))

    def attend(
        self, attention: Any, plan: RecordedPlan, q: Tensor, cache: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Takes down attention of ``q [T, Hq, D]``; returns the stand-in ``[T, Hq, D]``."""
        out = torch.empty(q.shape, dtype=q.dtype, device="meta")
        view, result = self._view(q), self._view(out)
        op = RecordedAttention(attention, plan.index, view, Fixed(cache), result, Fixed(sinks))
        self._add(op, (view, result))
        return out

    def keep(self, tensor: Tensor) -> None:
        """Makes a tensor the program's result, which nothing overwrites in its run."""
        recording = self.recording
        recording.result = self._view(tensor)
        recording.buffers[recording.result.buffer].last = len(recording.ops)

    # --- torch's ops -------------------------------------------------------------------

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() != 2:
            raise Unrecordable(f"a product of {tuple(x.shape)} cannot be recorded")
        factors = x, weight.t()
        if bias is None:
            return self._call(torch.mm, factors, x, weight.shape[0])
        return self._call(torch.addmm, (bias, *factors), x, weight.shape[0])

    def _embedding(self, table: Tensor, token_ids: Tensor, *rest: Any, **named: Any) -> Tensor:
        if rest not in ((), (-1,)) or named:
            raise Unrecordable("an embedding with options cannot be recorded")
        return self._call(torch.index_select, (table, 0, token_ids), token_ids, table.shape[1])

    def _index(self, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        """Rows of x."""
        [index] = indices if len(indices) == 1 else [None]
        if index is None or index.dtype != torch.int64 or x.dim() != 2:
            raise Unrecordable("an index other than one of rows cannot be recorded")
        return self._call(torch.index_select, (x, 0, index), index, x.shape[1], x.dtype)

    def _scale(self, x: Tensor, factor: Any) -> Tensor:
        """In place."""
        if isinstance(factor, Tensor):
            raise Unrecordable("a product by a tensor in place cannot be recorded")
        view = self._view(x)
        self._add(RecordedCall(torch.mul, view.size, (view, Fixed(factor)), view), (view,))
        return x

    def _convert(self, x: Tensor, dtype: torch.dtype, *rest: Any, **named: Any) -> Tensor:
        if x.dim() != 2 or rest or named:
            raise Unrecordable("a copy of other than rows in another dtype cannot be recorded")
        return x if x.dtype == dtype else self._call(_copy, (x,), x, x.shape[1], dtype)

    def _call(
        self, function: Callable[..., Any], given: Sequence[Any], rows: Tensor, width: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Takes a function of torch down whose output has the rows of a tensor."""
        if dtype is None:
            dtype = next(each.dtype for each in reversed(given) if _is_real(each))
        out = self._made(torch.empty((rows.shape[0], width), dtype=dtype, device="meta"))
        operands = tuple(self._operand(each) for each in given)
        view = self._view(out)
        self._add(RecordedCall(function, view.size, operands, view), (*operands, view))
        return out

    # --- the book ----------------------------------------------------------------------

    def _given(self, stand_in: Tensor) -> Tensor:
        self._found[_storage(stand_in)] = -1 - self.recording.num_inputs
        self.recording.num_inputs += 1
        self._held.append(stand_in)
        return stand_in

    def _made(self, tensor: Tensor) -> Tensor:
        """Makes a buffer of an empty tensor."""
        if not tensor.is_meta or tensor.dim() < 2 or not self._is_rows(tensor.shape[0]):
            raise Unrecordable(f"a tensor {tuple(tensor.shape)} does not have the step's tokens")
        if not tensor.is_contiguous():
            raise Unrecordable(f"a tensor with strides {tensor.stride()} cannot be recorded")
        recording, at = self.recording, len(self.recording.ops)
        self._found[_storage(tensor)] = len(recording.buffers)
        row_bytes = prod(tensor.shape[1:]) * tensor.itemsize
        size = self._size_of(tensor.shape[0])
        recording.buffers.append(Buffer(size, row_bytes, at, at))
        self._held.append(tensor)
        return tensor

    def _operand(self, value: Any) -> Operand:
        if not isinstance(value, Tensor) or not value.is_meta:
            return Fixed(value)
        found = self._found.get(_storage(value), 0)
        if found >= 0:
            return self._view(value)
        if value.numel() * value.itemsize != value.untyped_storage().nbytes():
            raise Unrecordable("a part of an input cannot be recorded")
        return Input(-1 - found)

    def _view(self, tensor: Tensor) -> View:
        buffer = self._found.get(_storage(tensor), -1) if tensor.is_meta else -1
        if buffer < 0 or not tensor.dim() or not self._is_rows(tensor.shape[0]):
            raise Unrecordable(f"a tensor {tuple(tensor.shape)} that no recorded op made")
        size = self._size_of(tensor.shape[0])
        offset, tail = int(tensor.storage_offset()), tuple(tensor.shape[1:])
        return View(buffer, size, offset, tail, tensor.stride(), tensor.dtype)

    def _is_rows(self, count: int) -> bool:
        """Whether it is the first dimension of a tensor of the step; 1 is of what all its rows have
        in common."""
        return count == 1 or count in self._sizes[: Size.ROWS]

    def _size_of(self, count: int) -> int:
        """The index of a stand-in's size; of any other number, that of one that stays."""
        if count in self._sizes:
            return self._sizes.index(count)
        return self._derive(Derived(Always(count), None))

    def _derive(self, derived: Derived) -> int:
        found = self.recording.derived
        if derived not in found:
            found.append(derived)
            self._sizes.append(derived.of(self._sizes))
        return len(Size) + found.index(derived)

    def _source(self, size: int) -> Size | None:
        """The size of the step that it is or follows from."""
        return Size(size) if size < len(Size) else self.recording.derived[size - len(Size)].source

    def _add(self, op: RecordedOp, operands: Sequence[Operand | Count]) -> None:
        recording = self.recording
        sizes = [op.size, *(each.size for each in operands if isinstance(each, View | Count))]
        sources = map(self._source, sizes)
        source = next((each for each in sources if each is not None), None)
        if source == Size.WANTED:
            self._has_wanted = True
        elif self._has_wanted and source is not None:
            raise Unrecordable("an op on all tokens behind one on those that are wanted")
        recording.num_token_ops += not self._has_wanted
        for operand in operands:
            if isinstance(operand, View):
                recording.buffers[operand.buffer].last = len(recording.ops)
        recording.ops.append(op)


_CALLS: Mapping[Any, Callable[..., Tensor]] = {
    aten.linear.default: LaunchRecorder._linear,
    aten.embedding.default: LaunchRecorder._embedding,
    aten.index.Tensor: LaunchRecorder._index,
    aten.mul_.Tensor: LaunchRecorder._scale,
    aten.mul_.Scalar: LaunchRecorder._scale,
    aten.to.dtype: LaunchRecorder._convert,
}

_EMPTY = frozenset({
    aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default,
})  # fmt: skip


def _stand_in(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device="meta")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _copy(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(x)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def record(
    run: Callable[[Sequence[ModelInputs]], Tensor], block_sizes: Sequence[int], capacity: int
) -> Recording:
    """The recording of a step.

    Args:
        run: the layers of a step, from its inputs per KV group to the hidden states that are
            wanted. The order of the program's inputs is token ids, positions, the wanted tokens,
            the slot mapping of each group, then, for layers with recurrent states, each row's slot
            of them and first token.
        block_sizes: of each KV group.
        capacity: tokens of the largest step, which launch shapes are chosen for.

    Raises:
        Unrecordable: it cannot be recorded.
    """
    first, second = (
        _recorded(run, block_sizes, LaunchRecorder(sizes, capacity)) for sizes in STAND_INS
    )
    if not first.agrees(second):
        raise Unrecordable("what is launched depends on the number of tokens")
    return first


def _recorded(
    run: Callable[[Sequence[ModelInputs]], Tensor],
    block_sizes: Sequence[int],
    recorder: LaunchRecorder,
) -> Recording:
    token_ids, positions, wanted = recorder.given(), recorder.given(), recorder.wanted()
    nothing = torch.empty(0, dtype=torch.int64, device="cpu").numpy()
    inputs = [
        ModelInputs(
            num_decodes=0,
            token_ids=token_ids,
            positions=positions,
            logits_indices=wanted,
            req_indices=wanted,
            host_req_indices=nothing,
            query_start_loc=nothing,
            seq_lens=nothing,
            starts=nothing,
            slot_mapping=recorder.given(),
            host_table=nothing,
            device_table=None,
            block_size=block_size,
        )
        for block_size in block_sizes
    ]
    with torch.inference_mode(), recorder:
        recorder.keep(run(inputs))
    return recorder.recording
