"""TritonStateRows: a step's rows, as kernels of recurrent layers read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncllm.gpu.batch.step_inputs import StepInputs

TILE_TOKENS = 8
"""Tokens of a row that one program computes, in kernels over tokens."""


@dataclass(frozen=True, slots=True)
class TritonStateRows:
    """A step's rows on the device.

    In a mixed step, rows of one token and longer rows have separate kernels, each of which skips
    the other's rows. So launches depend on the numbers of rows and tokens alone.

    Attributes:
        slots: ``[R]`` int64, slots of the rows' states.
        positions: ``[T]`` int64.
        query_start: ``[R + 1]`` int64, each row's first token; not read unless ``is_mixed``.
        is_mixed: rows may have several tokens.
    """

    slots: Tensor
    positions: Tensor
    query_start: Tensor
    is_mixed: bool

    @classmethod
    def of(cls, step: StepInputs) -> TritonStateRows:
        if step.host is None:
            slots = step.table_rows()
            return cls(slots, step.positions, slots, False)
        is_mixed = step.num_decodes != step.num_rows
        return cls(step.req_indices, step.positions, step.query_start_loc, is_mixed)

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]

    @property
    def num_tiles(self) -> int:
        """Tiles of TILE_TOKENS tokens that suffice for rows of any lengths."""
        return self.positions.shape[0] // TILE_TOKENS + self.num_rows
