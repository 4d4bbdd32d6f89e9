"""TritonStateRows: a step's rows, as kernels that keep a state of each sequence read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.h2d import copy_to_device


@dataclass(frozen=True, slots=True)
class TritonStateRows:
    """A step's rows on the device. Rows of one token and longer ones have kernels of their own,
    each of which passes over the other's.

    Attributes:
        slots: ``[R]`` int64.
        positions: ``[T]`` int64.
        query_start: ``[R + 1]`` int64, each row's first token; not read where each has one.
        longest: tokens of the longest row.
        has_single: whether a row has one token.
    """

    slots: Tensor
    positions: Tensor
    query_start: Tensor
    longest: int
    has_single: bool

    @classmethod
    def of(cls, inputs: ModelInputs | DecodeInputs) -> TritonStateRows:
        if isinstance(inputs, DecodeInputs):
            slots = inputs.state_indices()
            return cls(slots, inputs.positions, slots, 1, True)
        starts, counts = inputs.query_start_loc, inputs.seq_lens - inputs.starts
        if inputs.num_decodes == inputs.num_rows:
            return cls(inputs.req_indices, inputs.positions, inputs.req_indices, 1, True)
        on_device = copy_to_device(starts, inputs.positions.device)
        longest, single = int(counts.max()), bool((counts == 1).any())
        return cls(inputs.req_indices, inputs.positions, on_device, longest, single)

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]
