"""BufferSections: named arrays that lie in one allocation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.h2d import lazy_zeros

_ALIGNMENT_BYTES = 16

SectionTable = Mapping[str, tuple[torch.dtype, int]]
"""Dtype and number of elements of each section, by name, in their order in memory."""


class BufferSections:
    """Arrays in one allocation, so that one copy moves all of them.

    Attributes:
        memory: the allocation, uint8.
        tensors: the sections by name.
        end_offsets: by name, offset of the first byte after the section.

    Raises:
        MemoryError: too little memory on the host.
    """

    def __init__(self, table: SectionTable, device: torch.device, *, pinned: bool = False) -> None:
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, count) in table.items():
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            end = start + count * dtype.itemsize
            spans[name] = start, end
        if pinned:
            self.memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=True)
        else:
            self.memory = lazy_zeros((end,), torch.uint8, device)
        self.tensors: dict[str, Tensor] = {
            name: self.memory[start:end].view(table[name][0])
            for name, (start, end) in spans.items()
        }
        self.end_offsets = {name: end for name, (_, end) in spans.items()}

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Numpy views of the sections. The buffer must be in host memory."""
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def copy_from(self, source: BufferSections, last_section: str) -> None:
        """Queues a copy of all sections up to ``last_section`` from ``source``, which has the same
        SectionTable."""
        end = self.end_offsets[last_section]
        self.memory[:end].copy_(source.memory[:end], non_blocking=True)
