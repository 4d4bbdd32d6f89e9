"""StepBuffer: the host's part of a step, in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.batch.block_table import NO_BLOCKS
from asyncllm.gpu.batch.decode_inputs import SamplingTensors
from asyncllm.gpu.batch.grammar_masks import GrammarMasks
from asyncllm.gpu.batch.sampling_inputs import RuleTensors, Stages, TopLogprobs
from asyncllm.gpu.sample.sampling_state import LineUpdate, SamplingState

if TYPE_CHECKING:
    from asyncllm.gpu.sample.host_rows import HostRows

_ALIGNMENT = 16


class StepBuffer:
    """Sections of one allocation, so that a step takes one copy from host to device instead of
    a dozen. N is ``max_num_seqs``.

    CUDA graphs hold the addresses of the one on the device.

    Attributes:
        memory: all of it, uint8.
        req_indices, host_token_ids, positions: ``[N]`` int64, see DecodeInputs.
        sampling, rules: by request index, ``[N + 1]`` each.
        table_changes: per KV group ``[N]`` int64, indices into the flat block table, and
            ``[N]`` int32, their new values.
    """

    def __init__(
        self, max_num_seqs: int, num_groups: int, device: torch.device, *, pinned: bool = False
    ) -> None:
        rows, lines = max_num_seqs, max_num_seqs + 1
        sections = [
            *[(torch.int64, rows)] * 3,
            (torch.int64, lines),
            (torch.float32, lines),
            (torch.int32, lines),
            *[(torch.float32, lines)] * 2,
            *[(torch.int32, lines)] * 3,
            *[(torch.int64, lines)] * 2,
            *[(torch.float32, lines)] * 3,
            *[(torch.int64, rows), (torch.int32, rows)] * num_groups,
        ]
        spans: list[tuple[int, int]] = []
        end = 0
        for dtype, count in sections:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + count * dtype.itemsize
            spans.append((start, end))
        self.memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._sections = views = [
            self.memory[start:end].view(dtype)
            for (start, end), (dtype, _) in zip(spans, sections, strict=True)
        ]
        self.req_indices, self.host_token_ids, self.positions = views[:3]
        self.sampling = SamplingTensors(*views[3:8])
        self.rules = RuleTensors(*views[8:16])
        self.table_changes = list(zip(views[16::2], views[17::2], strict=True))
        self.req_indices.fill_(-1)
        self.sampling.top_p.fill_(1.0)


class PinnedStepBuffer(StepBuffer):
    """A StepBuffer in host memory, with the parts of a step that are copied apart from it.

    Args:
        padding_indices: per KV group an entry of the flat block table that is never read.

    Attributes:
        tokens: ``[N]`` int64, where the step's sampled tokens arrive.
        blocks_to_zero: KV blocks to clear ahead of the step.
        state_loads, state_saves: of its StepBatch.
        stages: of sampling.
        updates: lines of the LogitsTables to write ahead of the step.
        host_rows: rows of the step that are sampled apart, with the host; None without.
        prompt_hidden: hidden states ``[E, H]`` of the step at the positions that prompt
            log-probabilities are wanted of; None if there are none.
        masks: of the step; made for the first one that has any.
        logprobs: where the step's arrive; likewise.
        overflow: ``(group, indices, values)`` of each group with more than N table changes.
    """

    def __init__(self, max_num_seqs: int, padding_indices: Sequence[int], *, pinned: bool) -> None:
        super().__init__(max_num_seqs, len(padding_indices), torch.device("cpu"), pinned=pinned)
        self.tokens = torch.full((max_num_seqs,), -1, dtype=torch.int64, pin_memory=pinned)
        self.blocks_to_zero = NO_BLOCKS
        self.state_loads: list[tuple[int, int]] = []
        self.state_saves: list[tuple[int, int]] = []
        self.stages = Stages.NONE
        self.updates: list[LineUpdate] = []
        self.host_rows: HostRows | None = None
        self.prompt_hidden: Tensor | None = None
        self.masks: GrammarMasks | None = None
        self.logprobs: TopLogprobs | None = None
        self.overflow: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._padding_indices = padding_indices
        sections = [section.numpy() for section in self._sections]
        self._rows, self._sampling = sections[:3], sections[3:16]
        self._changes = list(zip(sections[16::2], sections[17::2], strict=True))
        self._sampling_version = -1

    def set_rows(
        self, req_indices: np.ndarray, token_ids: np.ndarray, positions: np.ndarray
    ) -> None:
        """The rows of a step, ``[B]`` each; the rest is padding."""
        count = len(req_indices)
        for section, values, padding in zip(
            self._rows, (req_indices, token_ids, positions), (-1, 0, 0), strict=True
        ):
            section[:count], section[count:] = values, padding

    def set_table_changes(self, changes: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Changes of each group's block table; no index twice."""
        self.overflow = []
        for group, (indices, values) in enumerate(changes):
            to, new = self._changes[group]
            count = len(indices)
            if count > len(to):
                self.overflow.append((group, indices, values))
                count = 0
            to[:count], to[count:] = indices[:count], self._padding_indices[group]
            new[:count], new[count:] = values[:count], 0

    def set_sampling(self, state: SamplingState) -> None:
        """The parameters of all request indices, unless this buffer has them already."""
        if state.version == self._sampling_version:
            return
        self._sampling_version = state.version
        for section, value in zip(self._sampling, state.arrays(), strict=True):
            section[:] = value
