"""Recording: what a step launches, as a LaunchRecorder took it down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from asyncllm.gpu.ops.buffer_layout import Lifetime, lay_out

BUFFER_ALIGNMENT = 512
"""Bytes; that of torch's allocator, so that products take the same kernels."""


class Size(IntEnum):
    """First dimensions that a step decides: its tokens, those whose hidden states are wanted behind
    the last layer, and of kernels over recurrent states its rows and their tiles. Sizes behind
    these are a recording's own, which are derived from them."""

    TOKENS = 0
    WANTED = 1
    ROWS = 2
    TILES = 3


@dataclass(frozen=True, slots=True)
class Derived:
    """A size that follows from another by a rule; from none of them if it is always the same."""

    rule: Callable[[int], int]
    source: Size | None

    def of(self, sizes: Sequence[int]) -> int:
        return self.rule(0 if self.source is None else sizes[self.source])


@dataclass(frozen=True, slots=True)
class Always:
    """The rule of a size that no step decides."""

    count: int

    def __call__(self, _: int) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class View:
    """Rows of a buffer, at an offset in elements.

    Attributes:
        tail, strides: its shape behind the rows, and its strides, in elements.
    """

    buffer: int
    size: int
    offset: int
    tail: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Input:
    """One of the step's inputs, by the order in which they were given."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """What is the same in every step: a weight, a cache, a number."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        value = self.value
        if not isinstance(value, Tensor):
            return type(value), value
        shape, strides = tuple(value.shape), value.stride()
        return value.data_ptr(), value.dtype, value.device, shape, strides


Operand = View | Input | Fixed


@dataclass(frozen=True, slots=True)
class Count:
    """A size of the step as a number of a launch."""

    size: int


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """A launch of as many programs as ``size``, with the rest of its grid, y and z; some of its
    numbers may be Counts."""

    bound: Any
    size: int
    grid: tuple[int, int]
    operands: tuple[Operand, ...]
    numbers: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """``function(*operands, out=out)`` of torch."""

    function: Callable[..., Any]
    size: int
    operands: tuple[Operand, ...]
    out: View


@dataclass(frozen=True, slots=True)
class RecordedAttention:
    """Attention of a layer by the step's plan of that index; ``sinks`` may be None."""

    attention: Any
    plan: int
    q: View
    cache: Fixed
    out: View
    sinks: Fixed

    @property
    def size(self) -> int:
        return self.out.size


RecordedOp = RecordedLaunch | RecordedCall | RecordedAttention


@dataclass(slots=True)
class Buffer:
    """An activation ``[rows, ...]``, and the ops between which it is in use."""

    size: int
    row_bytes: int
    first: int
    last: int


@dataclass(eq=False)
class Recording:
    """What a recorder took down.

    Attributes:
        num_token_ops: ops before the first on wanted tokens alone.
        derived: sizes behind those of Size, in their order.
        result: the view that was kept.
    """

    ops: list[RecordedOp] = field(default_factory=list)
    num_token_ops: int = 0
    derived: list[Derived] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    num_inputs: int = 0
    result: View | None = None

    def sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """All sizes of a step, from those by Size."""
        return (*sizes, *(each.of(sizes) for each in self.derived))

    def layout(self, capacity: int) -> tuple[list[int], int]:
        """The first byte of each buffer in a step of so many tokens, and the bytes of all."""
        sizes = self.sizes([capacity] * len(Size))
        lifetimes = [
            Lifetime(sizes[buffer.size] * buffer.row_bytes, buffer.first, buffer.last)
            for buffer in self.buffers
        ]
        return lay_out(lifetimes, BUFFER_ALIGNMENT)

    def num_bytes(self, capacity: int) -> int:
        """Of the activations."""
        return self.layout(capacity)[1]

    def agrees(self, other: Recording) -> bool:
        return self._taken_down() == other._taken_down()

    def _taken_down(self) -> tuple[Any, ...]:
        return self.ops, self.buffers, self.derived, self.result
