"""HostBuffer: a step in host memory, from its launch to its end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncllm.gpu.batch.grammar_masks import GrammarMasks
from asyncllm.gpu.batch.sampling_inputs import TopLogprobs
from asyncllm.gpu.batch.sampling_table import SCALARS
from asyncllm.gpu.batch.step_buffer import StepBuffer, StepLimits
from asyncllm.gpu.sample.sampling_state import SamplingState

CPU = torch.device("cpu")

TableChange = tuple[int, np.ndarray, np.ndarray]
"""KV group, indices into its flat block table, and their new values."""


class HostBuffer(StepBuffer):
    """A step's sections in host memory, and what comes back from the device.

    Args:
        num_logprobs: per token, in a step with log-probabilities.
        padding_indices: per KV group an entry of the flat block table that is never read; () where
            the device reads the host's tables.

    Attributes:
        tokens: ``[N]`` int64, where the sampled tokens arrive.
    """

    def __init__(
        self, limits: StepLimits, vocab_size: int, num_logprobs: int,
        padding_indices: Sequence[int] = (), *, pinned: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(limits, CPU, pinned=pinned)
        self.tokens = torch.full(
            (limits.rows,), -1, dtype=torch.int64, device=CPU, pin_memory=pinned
        )
        self._vocab_size, self._num_logprobs, self._pinned = vocab_size, num_logprobs, pinned
        self._padding_indices = padding_indices
        self._masks: GrammarMasks | None = None
        self._logprobs: TopLogprobs | None = None
        self._scalars_version = -1

    @property
    def masks(self) -> GrammarMasks:
        """The step's masks; allocated for the first step that has any."""
        if self._masks is None:
            sizes = self.limits.rows, self._vocab_size
            self._masks = GrammarMasks(*sizes, CPU, pinned=self._pinned)
        return self._masks

    @property
    def logprobs(self) -> TopLogprobs:
        """Where the step's log-probabilities arrive; allocated likewise."""
        if self._logprobs is None:
            sizes = self.limits.rows, self._num_logprobs
            self._logprobs = TopLogprobs(*sizes, CPU, pinned=self._pinned)
        return self._logprobs

    def set_table_changes(
        self, changes: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> list[TableChange]:
        """Writes changes of each group's block table.

        Returns:
            Those of groups with more of them than there is room for.
        """
        overflow: list[TableChange] = []
        for group, (indices, values) in enumerate(changes):
            to, new = self.arrays[f"changed_{group}"], self.arrays[f"new_blocks_{group}"]
            count = len(indices)
            if count > len(to):
                overflow.append((group, indices, values))
                count = 0
            to[:count], to[count:] = indices[:count], self._padding_indices[group]
            new[:count], new[count:] = values[:count], 0
        return overflow

    def set_scalars(self, state: SamplingState) -> None:
        """Writes the scalars of all request indices, unless this buffer has them already."""
        if state.version == self._scalars_version:
            return
        self._scalars_version = state.version
        for name in SCALARS:
            self.arrays[name][:] = state.sections.arrays[name]
