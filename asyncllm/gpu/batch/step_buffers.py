"""StepBlock: everything that the host tells the device about a step, in one piece of memory."""

from __future__ import annotations

import numpy as np
import torch

from asyncllm.gpu.batch.decode_inputs import SlotSampling
from asyncllm.gpu.sample.sampling_state import SamplingState

_ALIGNMENT = 16


class StepBlock:
    """One copy from host to device instead of a dozen. N slots.

    On the device there is one block, whose addresses a CUDA graph holds. On the host there is
    one more than there may be steps in flight, because a copy that is queued reads the host's
    memory late.

    Attributes:
        memory: all of it, uint8.
        slots, known_tokens, positions: ``[N]`` int64, see DecodeRows.
        cells: ``[N]`` int64, entries of the flat block table that change.
        blocks: ``[N]`` int32, what they become.
        sampling: by slot, ``[N + 1]`` each.
    """

    def __init__(self, num_slots: int, device: torch.device, *, pinned: bool = False) -> None:
        lines = num_slots + 1
        sections = {
            "slots": (torch.int64, num_slots),
            "known_tokens": (torch.int64, num_slots),
            "positions": (torch.int64, num_slots),
            "cells": (torch.int64, num_slots),
            "states": (torch.int64, lines),
            "blocks": (torch.int32, num_slots),
            "top_k": (torch.int32, lines),
            "temperature": (torch.float32, lines),
            "top_p": (torch.float32, lines),
            "min_p": (torch.float32, lines),
        }
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, count) in sections.items():
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + count * dtype.itemsize
            spans[name] = start, end
        self.memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        views = {
            name: self.memory[slice(*spans[name])].view(dtype)
            for name, (dtype, _) in sections.items()
        }
        self.slots, self.known_tokens = views["slots"], views["known_tokens"]
        self.positions = views["positions"]
        self.cells, self.blocks = views["cells"], views["blocks"]
        self.sampling = SlotSampling(
            views["states"], views["temperature"], views["top_k"], views["top_p"], views["min_p"]
        )
        self.slots.fill_(-1)
        self.sampling.top_p.fill_(1.0)


class HostBlock:
    """A StepBlock in host memory, and where the step's tokens come back to.

    Args:
        spare_cell: an entry of the block table that nobody reads.

    Attributes:
        block: to be copied to the device.
        tokens: ``[N]`` int64, sampled tokens.
    """

    def __init__(self, num_slots: int, spare_cell: int, *, pinned: bool) -> None:
        self.block = StepBlock(num_slots, torch.device("cpu"), pinned=pinned)
        self.tokens = torch.full((num_slots,), -1, dtype=torch.int64, pin_memory=pinned)
        self._spare_cell = spare_cell
        self._slots, self._known = self.block.slots.numpy(), self.block.known_tokens.numpy()
        self._positions = self.block.positions.numpy()
        self._cells, self._blocks = self.block.cells.numpy(), self.block.blocks.numpy()
        sampling = self.block.sampling
        self._states = sampling.states.numpy()
        self._temperature, self._top_k = sampling.temperature.numpy(), sampling.top_k.numpy()
        self._top_p, self._min_p = sampling.top_p.numpy(), sampling.min_p.numpy()

    def set_rows(self, slots: np.ndarray, known: np.ndarray, positions: np.ndarray) -> None:
        """The rows of a step, ``[B]`` each; the rest is padding."""
        count = len(slots)
        self._slots[:count], self._slots[count:] = slots, -1
        self._known[:count], self._known[count:] = known, 0
        self._positions[:count], self._positions[count:] = positions, 0

    def set_changes(self, cells: np.ndarray, blocks: np.ndarray) -> None:
        """Changes of the block table, at most N; no cell twice."""
        count = len(cells)
        self._cells[:count], self._cells[count:] = cells, self._spare_cell
        self._blocks[:count], self._blocks[count:] = blocks, 0

    def set_sampling(self, state: SamplingState) -> None:
        """The parameters of all slots."""
        self._states[:-1] = state.seeds.view(np.int64)
        self._temperature[:-1] = state.temperature
        self._top_k[:-1] = state.top_k
        self._top_p[:-1] = state.top_p
        self._min_p[:-1] = state.min_p


class HostBlocks:
    """Host blocks that take turns.

    Args:
        count: one more than steps in flight.
    """

    def __init__(self, num_slots: int, spare_cell: int, count: int, *, pinned: bool) -> None:
        self.blocks = [HostBlock(num_slots, spare_cell, pinned=pinned) for _ in range(count)]
        self._turn = -1

    def next(self) -> HostBlock:
        """The block that was handed out longest ago."""
        self._turn = (self._turn + 1) % len(self.blocks)
        return self.blocks[self._turn]
