"""LaunchProgram: a step's launches over buffers that stay, as a loop over functions and arguments.

What Python costs a step that is launched op by op is mostly the same in all its layers and in every
step: outputs are allocated, views made of them, and each kernel's arguments looked at. Here all of
that is done once. A launch over the rows of a step is one call of the launcher's C function with
the number of rows; what attention's launches have in common is made by the first layer of each
step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch
from torch import Tensor

from asyncllm.gpu.ops.triton.launcher import (
    ALIGNMENT,
    BoundKernel,
    current_stream,
    is_observed,
)
from asyncllm.gpu.ops.triton.recording import (
    Count,
    Fixed,
    Input,
    Operand,
    RecordedAttention,
    RecordedCall,
    RecordedLaunch,
    Recording,
    Size,
    View,
)
from asyncllm.gpu.ops.triton.state_rows import TritonStateRows

WANTED_INPUT = 2
"""Of the program's inputs, as ``launch_recorder.record`` orders them."""


class Operands:
    """The tensors that ops read and write, and numbers among their arguments, each once.

    Attributes:
        values: of the step that runs.
        addresses: of those that stay where they are; 0 for others.
    """

    def __init__(self, memory: Tensor, starts: Sequence[int], num_inputs: int) -> None:
        self._memory, self._starts = memory, starts
        self._memories: dict[torch.dtype, Tensor] = {}
        self._slots: dict[Hashable, int] = {Input(index): index for index in range(num_inputs)}
        self._views: list[tuple[int, View, int]] = []
        self._sizes: tuple[int, ...] = ()
        self.values: list[Any] = [None] * num_inputs
        self.addresses = [0] * num_inputs

    def slot(self, operand: Operand) -> int:
        """Its place among the values. Buffers of different layers lie at the same place, so that
        views of a few are those of all of them."""
        key: Hashable = operand
        if isinstance(operand, View):
            key = replace(operand, buffer=0), self._starts[operand.buffer]
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = len(self.values)
            self.values.append(operand.value if isinstance(operand, Fixed) else None)
            self.addresses.append(self._address(found, operand))
        return found

    def _address(self, slot: int, operand: Operand) -> int:
        if isinstance(operand, Fixed):
            value = operand.value
            return value.data_ptr() if isinstance(value, Tensor) else 0
        assert isinstance(operand, View)
        start, itemsize = self._starts[operand.buffer], operand.dtype.itemsize
        if operand.dtype not in self._memories:
            self._memories[operand.dtype] = self._memory.view(operand.dtype)
        self._views.append((slot, operand, start // itemsize + operand.offset))
        return self._memory.data_ptr() + start + operand.offset * itemsize

    def enter(self, inputs: Sequence[Tensor], sizes: tuple[int, ...]) -> None:
        """Takes a step's inputs, and the views of its sizes."""
        self.values[: len(inputs)] = inputs
        if sizes[: Size.ROWS] == self._sizes:
            return
        for slot, view, offset in self._views:
            shape = sizes[view.size], *view.tail
            memory = self._memories[view.dtype]
            self.values[slot] = memory.as_strided(shape, view.strides, offset)
        self._sizes = sizes[: Size.ROWS]

    def leave(self, num_inputs: int) -> None:
        """Lets go of a step's inputs."""
        self.values[:num_inputs] = [None] * num_inputs


class Step:
    """The step that runs.

    Attributes:
        sizes: by Size, and those that the recording derives.
        plans: of attention.
        inputs: addresses of the program's inputs, and behind them the sizes.
        repeats: by attention's class of launches, those that the next layer's are made from; None
            where they take the JIT's path.
        direct: launches that are known go to the driver as they are.
    """

    __slots__ = ("direct", "inputs", "plans", "repeats", "sizes")

    def __init__(
        self, sizes: tuple[int, ...], plans: Sequence[Any], inputs: list[int], *, direct: bool
    ) -> None:
        self.sizes, self.plans, self.inputs, self.direct = sizes, plans, inputs, direct
        self.repeats: dict[int, Sequence[Callable[..., None]] | None] = {}


class Launch:
    """A kernel over the rows of a step. Its first launch takes BoundKernel's path, as do all that
    a profiler looks at."""

    __slots__ = ("_bound", "_get", "_grid", "_holes", "_launch", "_numbers", "_rest", "_size",
                 "_values")  # fmt: skip

    def __init__(self, op: RecordedLaunch, operands: Operands, num_inputs: int) -> None:
        self._bound, self._size, self._grid = op.bound, op.size, op.grid
        slots = [operands.slot(each) for each in op.operands]
        self._values, self._get, self._numbers = operands.values, _getter(slots), op.numbers
        self._holes = [(place, slot) for place, slot in enumerate(slots) if slot < num_inputs]
        self._holes += [
            (place, num_inputs + number.size)
            for place, number in enumerate(op.numbers, len(slots))
            if isinstance(number, Count)
        ]
        self.forget()

    def forget(self) -> None:
        """Drops what was made for a stream."""
        self._launch: Callable[..., None] | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, step: Step) -> None:
        launch = self._launch
        if launch is None or not step.direct:
            self._first(step)
        elif not self._holes:
            launch(step.sizes[self._size], *self._rest)
        else:
            nested, arguments, rest = self._rest
            for place, slot in self._holes:
                arguments[place] = step.inputs[slot]
            if nested:
                launch(step.sizes[self._size], *rest, tuple(arguments))
            else:
                launch(step.sizes[self._size], *rest, *arguments)

    def _first(self, step: Step) -> None:
        numbers = (
            step.sizes[each.size] if isinstance(each, Count) else each for each in self._numbers
        )
        args: tuple[Any, ...] = (*self._get(self._values), *numbers)
        self._bound((step.sizes[self._size], *self._grid), *args)
        ready = self._bound.ready(*args) if step.direct else None
        if ready is None:
            return
        form, arguments = ready
        stream = current_stream(args[0].get_device())
        self._launch = form.launch
        if self._holes:
            self._rest = form.nested, list(arguments), (*self._grid, stream, *form.head)
        else:
            self._rest = *self._grid, stream, *form.rest(arguments)


class Call:
    """A function of torch into a buffer."""

    __slots__ = ("_function", "_get", "_out", "_values")

    def __init__(self, op: RecordedCall, operands: Operands) -> None:
        self._function, self._values = op.function, operands.values
        self._get = _getter([operands.slot(each) for each in op.operands])
        self._out = operands.slot(op.out)

    def __call__(self, step: Step) -> None:
        values = self._values
        self._function(*self._get(values), out=values[self._out])


class Attend:
    """Attention of a layer. What the layers of a class have in common, whose tensors are alike but
    for their addresses, the first of them makes.

    Args:
        alike: of that class.
    """

    __slots__ = ("_addresses", "_alike", "_attention", "_get", "_plan", "_values")

    def __init__(self, op: RecordedAttention, operands: Operands, alike: int) -> None:
        self._attention, self._plan, self._alike = op.attention, op.plan, alike
        slots = [operands.slot(each) for each in (op.q, op.cache, op.out, op.sinks)]
        self._values, self._get = operands.values, itemgetter(*slots)
        self._addresses = [operands.addresses[slot] for slot in slots]

    def __call__(self, step: Step) -> None:
        repeats, attention = step.repeats, self._attention
        launches = repeats.get(self._alike)
        if launches is None:
            q, cache, out, sinks = self._get(self._values)
            plan = step.plans[self._plan]
            if step.direct and self._alike not in repeats:
                launches = repeats[self._alike] = attention.repeats(q, cache, out, plan, sinks)
            if launches is None:
                attention.attend(q, cache, out, plan, sinks)
                return
        for launch in launches:
            launch(self._addresses)


class LaunchProgram:
    """The layers of a step, run by ``run``.

    Not thread-safe: what a run returns is valid until the next one.

    Args:
        capacity: tokens of the largest step.
        memory: another program's, of which one runs at a time; None for its own.

    Attributes:
        capacity: as given.
        num_bytes, memory: of the activations, uint8.

    Raises:
        torch.OutOfMemoryError: there is no room for the activations.
    """

    def __init__(
        self,
        recording: Recording,
        capacity: int,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> None:
        self.capacity, self._num_inputs = capacity, recording.num_inputs
        starts, self.num_bytes = recording.layout(capacity)
        if memory is None:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.memory, self._all_sizes = memory, recording.sizes
        self._operands = operands = Operands(self.memory, starts, recording.num_inputs)
        assert recording.result is not None
        self._result = operands.slot(recording.result)
        alike: dict[Any, int] = {}
        self._ops: list[Callable[[Step], None]] = []
        for op in recording.ops:
            if isinstance(op, RecordedLaunch):
                self._ops.append(Launch(op, operands, self._num_inputs))
            elif isinstance(op, RecordedCall):
                self._ops.append(Call(op, operands))
            else:
                kind = alike.setdefault(_kind(op, operands), len(alike))
                self._ops.append(Attend(op, operands, kind))
        launches = (op.bound for op in recording.ops if isinstance(op, RecordedLaunch))
        self._kernels = {each.launcher for each in launches if isinstance(each, BoundKernel)}
        self._num_token_ops = recording.num_token_ops
        self._stream: int | None = None

    def run(
        self, inputs: Sequence[Tensor], plans: Sequence[Any], rows: TritonStateRows | None = None
    ) -> Tensor:
        """Runs a step.

        Args:
            inputs: token ids and positions ``[T]``, the wanted tokens ``[E]``, and the slot mapping
                ``[T]`` of each KV group, int64.
            plans: of each kind of attention.
            rows: of a mixed step, for layers with recurrent states.

        Returns:
            Hidden states ``[E, H]``.
        """
        sizes = len(inputs[0]), len(inputs[WANTED_INPUT])
        if max(sizes) > self.capacity:
            raise ValueError(f"{sizes} tokens and wanted ones: expected {self.capacity} at most")
        of_rows = 0, 0
        if rows is not None:
            inputs = *inputs, rows.slots, rows.query_start
            of_rows = rows.num_rows, rows.num_tiles
        operands, sizes = self._operands, self._all_sizes((*sizes, *of_rows))
        operands.enter(inputs, sizes)
        addresses = [each.data_ptr() for each in inputs]
        direct = self._is_direct() and not reduce(or_, addresses) % ALIGNMENT
        step = Step(sizes, plans, [*addresses, *sizes], direct=direct)
        try:
            for op in self._ops if sizes[Size.WANTED] else self._ops[: self._num_token_ops]:
                op(step)
        finally:
            operands.leave(self._num_inputs)
        return operands.values[self._result]

    def _is_direct(self) -> bool:
        """Whether launches may go to the driver as they are."""
        kernels = self._kernels
        if not kernels or is_observed() or any(each.kernel.pre_run_hooks for each in kernels):
            return False
        stream = current_stream(self.memory.get_device())
        if stream != self._stream:
            for op in self._ops:
                if isinstance(op, Launch):
                    op.forget()
            self._stream = stream
        return True


def _kind(op: RecordedAttention, operands: Operands) -> tuple[Any, ...]:
    """What the launches of layers have in common whose addresses alone differ."""
    slots = [operands.slot(each) for each in (op.q, op.cache, op.out, op.sinks)]
    aligned = tuple(operands.addresses[slot] % ALIGNMENT for slot in slots)
    cache, sinks = op.cache.value, op.sinks.value
    views = tuple((each.tail, each.strides, each.dtype) for each in (op.q, op.out))
    strides = tuple(cache.shape), cache.stride(), cache.dtype
    return op.plan, op.attention, aligned, views, strides, None if sinks is None else sinks.dtype


def _getter(slots: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """``itemgetter``, which has a tuple for several indices only."""
    return itemgetter(*slots) if len(slots) > 1 else lambda values: (values[slots[0]],)
