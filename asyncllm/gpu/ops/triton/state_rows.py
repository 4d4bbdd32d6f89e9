"""TritonStateRows: metadata of a step's rows for the kernels of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncllm.gpu.batch.step_inputs import StepInputs

TILE_TOKENS = 8
"""Number of tokens of a row that one program of ``conv_chunk_kernel`` computes."""


@dataclass(frozen=True, slots=True)
class TritonStateRows:
    """Metadata of a step's rows, on the device.

    In a mixed step one kernel computes rows of one token and another computes longer rows. Each
    kernel is launched for all rows and skips those of the other kernel, so that the launches depend
    only on the numbers of rows and tokens.

    Attributes:
        slots: ``[R]`` int64, slots of the rows' states.
        positions: ``[T]`` int64.
        query_start: ``[R + 1]`` int64, index of each row's first token; not read unless
            ``is_mixed``.
        is_mixed: whether rows may have several tokens.
    """

    slots: Tensor
    positions: Tensor
    query_start: Tensor
    is_mixed: bool

    @classmethod
    def of(cls, step: StepInputs) -> TritonStateRows:
        if step.host is None:
            slots = step.nonnegative_req_indices()
            return cls(slots, step.positions, slots, False)
        is_mixed = step.num_decodes != step.num_rows
        return cls(step.req_indices, step.positions, step.query_start_loc, is_mixed)

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]

    @property
    def num_tiles(self) -> int:
        """Upper bound of the number of tiles of TILE_TOKENS tokens, for rows of any lengths."""
        return self.positions.shape[0] // TILE_TOKENS + self.num_rows
