"""TritonStateRows: a step's rows, as kernels that keep a state of each sequence read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncllm.gpu.batch.step_inputs import StepInputs

TILE_TOKENS = 8
"""Of a row, that a program of a kernel over tokens computes."""


@dataclass(frozen=True, slots=True)
class TritonStateRows:
    """A step's rows on the device. In a mixed step those of one token and longer ones have kernels
    of their own, each of which passes over the other's, so that what is launched depends on the
    numbers of rows and tokens alone.

    Attributes:
        slots: ``[R]`` int64.
        positions: ``[T]`` int64.
        query_start: ``[R + 1]`` int64, each row's first token; not read where each has one.
        is_mixed: rows may have several tokens.
    """

    slots: Tensor
    positions: Tensor
    query_start: Tensor
    is_mixed: bool

    @classmethod
    def of(cls, step: StepInputs) -> TritonStateRows:
        if step.host is None:
            slots = step.lines()
            return cls(slots, step.positions, slots, False)
        is_mixed = step.num_decodes != step.num_rows
        return cls(step.req_indices, step.positions, step.query_start_loc, is_mixed)

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]

    @property
    def num_tiles(self) -> int:
        """Never fewer than the rows need, of any lengths."""
        return self.positions.shape[0] // TILE_TOKENS + self.num_rows
