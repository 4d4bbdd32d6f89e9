"""StepBuffer: everything that the host tells the device about a step, in one piece of memory."""

from __future__ import annotations

import numpy as np
import torch

from asyncllm.gpu.batch.decode_inputs import SamplingTensors
from asyncllm.gpu.sample.sampling_state import SamplingState

_ALIGNMENT = 16


class StepBuffer:
    """One copy from host to device instead of a dozen. N slots.

    On the device there is one block, whose addresses a CUDA graph holds. On the host there is
    one more than there may be steps in flight, because a copy that is queued reads the host's
    memory late.

    Attributes:
        memory: all of it, uint8.
        req_indices, host_token_ids, positions: ``[N]`` int64, see DecodeInputs.
        table_indices: ``[N]`` int64, entries of the flat block table that change.
        table_values: ``[N]`` int32, what they become.
        sampling: by slot, ``[N + 1]`` each.
    """

    def __init__(self, max_num_seqs: int, device: torch.device, *, pinned: bool = False) -> None:
        lines = max_num_seqs + 1
        sections = {
            "req_indices": (torch.int64, max_num_seqs),
            "host_token_ids": (torch.int64, max_num_seqs),
            "positions": (torch.int64, max_num_seqs),
            "table_indices": (torch.int64, max_num_seqs),
            "states": (torch.int64, lines),
            "table_values": (torch.int32, max_num_seqs),
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
        self.req_indices, self.host_token_ids = views["req_indices"], views["host_token_ids"]
        self.positions = views["positions"]
        self.table_indices, self.table_values = views["table_indices"], views["table_values"]
        self.sampling = SamplingTensors(
            views["states"], views["temperature"], views["top_k"], views["top_p"], views["min_p"]
        )
        self.req_indices.fill_(-1)
        self.sampling.top_p.fill_(1.0)


class PinnedStepBuffer:
    """A StepBuffer in host memory, and where the step's tokens come back to.

    Args:
        padding_index: an entry of the block table that nobody reads.

    Attributes:
        block: to be copied to the device.
        tokens: ``[N]`` int64, sampled tokens.
    """

    def __init__(self, max_num_seqs: int, padding_index: int, *, pinned: bool) -> None:
        self.block = StepBuffer(max_num_seqs, torch.device("cpu"), pinned=pinned)
        self.tokens = torch.full((max_num_seqs,), -1, dtype=torch.int64, pin_memory=pinned)
        self._spare_cell = padding_index
        self._req_indices, self._known = (
            self.block.req_indices.numpy(),
            self.block.host_token_ids.numpy(),
        )
        self._positions = self.block.positions.numpy()
        self._table_indices, self._table_values = (
            self.block.table_indices.numpy(),
            self.block.table_values.numpy(),
        )
        sampling = self.block.sampling
        self._states = sampling.states.numpy()
        self._temperature, self._top_k = sampling.temperature.numpy(), sampling.top_k.numpy()
        self._top_p, self._min_p = sampling.top_p.numpy(), sampling.min_p.numpy()

    def set_rows(self, req_indices: np.ndarray, known: np.ndarray, positions: np.ndarray) -> None:
        """The rows of a step, ``[B]`` each; the rest is padding."""
        count = len(req_indices)
        self._req_indices[:count], self._req_indices[count:] = req_indices, -1
        self._known[:count], self._known[count:] = known, 0
        self._positions[:count], self._positions[count:] = positions, 0

    def set_table_changes(self, table_indices: np.ndarray, table_values: np.ndarray) -> None:
        """Changes of the block table, at most N; no cell twice."""
        count = len(table_indices)
        self._table_indices[:count], self._table_indices[count:] = table_indices, self._spare_cell
        self._table_values[:count], self._table_values[count:] = table_values, 0

    def set_sampling(self, state: SamplingState) -> None:
        """The parameters of all slots."""
        self._states[:-1] = state.seeds.view(np.int64)
        self._temperature[:-1] = state.temperature
        self._top_k[:-1] = state.top_k
        self._top_p[:-1] = state.top_p
        self._min_p[:-1] = state.min_p


class StepBufferRing:
    """Host blocks that take turns.

    Args:
        count: one more than steps in flight.
    """

    def __init__(self, max_num_seqs: int, padding_index: int, count: int, *, pinned: bool) -> None:
        self.buffers = [
            PinnedStepBuffer(max_num_seqs, padding_index, pinned=pinned) for _ in range(count)
        ]
        self._turn = -1

    def next(self) -> PinnedStepBuffer:
        """The block that was handed out longest ago."""
        self._turn = (self._turn + 1) % len(self.buffers)
        return self.buffers[self._turn]
