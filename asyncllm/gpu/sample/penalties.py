"""Presence, frequency and repetition penalties, with counts kept from step to step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.sample.sampling_state import SamplingState

_FIRST_ROWS = 4


class Penalties:
    """Token counts of requests with a penalty, and their effect on logits.

    Counts are rows of a table that grows with the number of such requests and is dropped when
    there are none, because most engines never need it.

    Attributes:
        counts: ``[rows, vocab_size]`` int32, how often the output holds each token.
        in_prompt: ``[rows, vocab_size]`` bool.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self.row_of: dict[int, int] = {}
        self._free: list[int] = []

    def assign(self, req_index: int, prompt: np.ndarray, output: np.ndarray) -> None:
        """Starts the counts of a request index from the tokens so far."""
        self.release(req_index)
        if not self._free:
            self._grow()
        row = self.row_of[req_index] = self._free.pop()
        counts = np.bincount(output, minlength=self.vocab_size).astype(np.int32)
        self.counts[row] = copy_to_device(counts, self.device)
        self.in_prompt[row] = False
        self.in_prompt[row, copy_to_device(prompt.astype(np.int64), self.device)] = True

    def release(self, req_index: int) -> None:
        row = self.row_of.pop(req_index, None)
        if row is None:
            return
        self._free.append(row)
        if not self.row_of:
            self.counts, self.in_prompt = self.counts[:0].clone(), self.in_prompt[:0].clone()
            self._free = []

    def apply(
        self, logits: Tensor, rows: np.ndarray, req_indices: np.ndarray, state: SamplingState
    ) -> None:
        """Penalises ``logits[rows]`` in place, as vLLM does: repetition, then frequency,
        then presence.

        Args:
            logits: ``[S, vocab_size]`` float32.
            rows, req_indices: rows of ``logits`` with a penalty, and their request indices.
        """
        index = self._index(rows)
        table = self._index(
            np.array([self.row_of[req_index] for req_index in req_indices.tolist()])
        )
        chosen, counts = logits[index], self.counts[table]
        used = counts > 0
        repetition = self._column(state.repetition[req_indices])
        factor = torch.where(chosen > 0, 1.0 / repetition, repetition)
        chosen = torch.where(used | self.in_prompt[table], chosen * factor, chosen)
        chosen -= self._column(state.frequency[req_indices]) * counts
        chosen -= self._column(state.presence[req_indices]) * used
        logits[index] = chosen

    def count(self, req_indices: np.ndarray, tokens: np.ndarray) -> None:
        """Adds sampled tokens to the counts of their requests."""
        table = self._index(
            np.array([self.row_of[req_index] for req_index in req_indices.tolist()])
        )
        self.counts[table, self._index(tokens)] += 1

    def _grow(self) -> None:
        old = self.counts.shape[0]
        rows = max(_FIRST_ROWS, 2 * old)
        shape = (rows - old, self.vocab_size)
        self.counts = torch.cat((self.counts, self.counts.new_zeros(shape)))
        self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros(shape)))
        self._free = list(range(rows - 1, old - 1, -1))

    def _index(self, values: np.ndarray) -> Tensor:
        return copy_to_device(values.astype(np.int64), self.device)

    def _column(self, values: np.ndarray) -> Tensor:
        return copy_to_device(values, self.device).unsqueeze(1)
