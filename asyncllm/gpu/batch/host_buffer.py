"""HostBuffer: a step's inputs and results in host memory, from its launch to its end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from asyncllm.gpu.batch.grammar_masks import GrammarMasks
from asyncllm.gpu.batch.sampling_inputs import TopLogprobs
from asyncllm.gpu.batch.sampling_table import SCALAR_PARAMS
from asyncllm.gpu.batch.step_buffer import StepBuffer, StepLimits
from asyncllm.gpu.sample.sampling_state import SamplingState

CPU_DEVICE = torch.device("cpu")

BlockTableChange = tuple[int, np.ndarray, np.ndarray]
"""KV group, indices into its flat block table, and their new values."""


class HostBuffer(StepBuffer):
    """A step's input sections and its results in host memory.

    Args:
        num_logprobs: number of log-probabilities per token for which ``logprobs`` has room.
        padding_indices: per KV group, index in the flat block table of an entry that no step reads;
            () if steps read the host's tables.

    Attributes:
        tokens: ``[N]`` int64, the sampled tokens.
    """

    def __init__(
        self, limits: StepLimits, vocab_size: int, num_logprobs: int,
        padding_indices: Sequence[int] = (), *, pinned: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(limits, CPU_DEVICE, pinned=pinned)
        self.tokens = torch.full(
            (limits.rows,), -1, dtype=torch.int64, device=CPU_DEVICE, pin_memory=pinned
        )
        self._vocab_size, self._num_logprobs, self._pinned = vocab_size, num_logprobs, pinned
        self._padding_indices = padding_indices
        self._scalars_version = -1

    @cached_property
    def grammar_masks(self) -> GrammarMasks:
        """The step's grammar masks, allocated on first use."""
        return GrammarMasks(self.limits.rows, self._vocab_size, CPU_DEVICE, pinned=self._pinned)

    @cached_property
    def logprobs(self) -> TopLogprobs:
        """The step's log-probabilities, allocated on first use."""
        return TopLogprobs(self.limits.rows, self._num_logprobs, CPU_DEVICE, pinned=self._pinned)

    def set_block_table_changes(
        self, changes: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> list[BlockTableChange]:
        """Writes the changes of each group's block table.

        Returns:
            The groups' changes that do not fit into the buffer.
        """
        overflow: list[BlockTableChange] = []
        for group, (indices, values) in enumerate(changes):
            changed = self.arrays[f"changed_{group}"]
            new_blocks = self.arrays[f"new_blocks_{group}"]
            count = len(indices)
            if count > len(changed):
                overflow.append((group, indices, values))
                count = 0
            changed[:count], changed[count:] = indices[:count], self._padding_indices[group]
            new_blocks[:count], new_blocks[count:] = values[:count], 0
        return overflow

    def set_scalar_params(self, state: SamplingState) -> None:
        """Writes the sampling scalars of all request indices, unless the buffer has their latest
        values."""
        if state.version == self._scalars_version:
            return
        self._scalars_version = state.version
        for name in SCALAR_PARAMS:
            self.arrays[name][:] = state.sections.arrays[name]
