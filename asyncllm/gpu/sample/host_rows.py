"""HostRows: the rows of a step that runs ahead whose tokens are drawn with the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.batch.decode_inputs import SamplingTensors
from asyncllm.gpu.batch.sampling_inputs import SamplingRows, Stages
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.sample.sampler import EagerStep, SampleOutput, Sampler


class HostRows:
    """K rows of a step that are sampled apart from the others, in two halves.

    ``take`` is queued behind the forward pass, where the device has the state of this step, and
    copies all that the rows are sampled from: the next step may be queued, and run, before the
    host comes to them, and their request indices may have other requests by then. ``sample``
    applies what needs the host, and draws; the step's end has to be waited for first.

    Args:
        places: ``[K]``, their places among the rows that are sampled.
        req_indices, positions: ``[K]``; all tokens before ``positions`` are known.
    """

    def __init__(
        self,
        sampler: Sampler,
        places: np.ndarray,
        req_indices: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        self.places, self.req_indices = places, req_indices
        self._sampler = sampler
        self._rules = sampler.snapshot(req_indices, positions)
        self._step: EagerStep | None = None
        self._logits = self._processed = torch.empty(0)

    def take(
        self, logits: Tensor, rows: SamplingRows, sampling: SamplingTensors, stages: Stages
    ) -> Tensor:
        """Queues the first half.

        Args:
            logits: ``[S, vocab_size]`` of the whole step, as are ``rows``.
            sampling: by request index.
            stages: of the whole step.

        Returns:
            ``places`` on the device.
        """
        index = copy_to_device(self.places, logits.device)
        own = rows.at(index)
        self._logits = logits[index]
        self._rules.stages |= (stages & Stages.MASKS).value
        # A line for each row, and one behind them for padding.
        lines = torch.cat((own.lines(), own.lines()[:1]))
        by_row = SamplingTensors(
            sampling.states[lines],
            sampling.temperature[lines],
            sampling.top_k[lines],
            sampling.top_p[lines],
            sampling.min_p[lines],
        )
        self._step = EagerStep(self._rules, by_row, own)
        every = np.arange(len(self.places))
        self._processed = self._sampler.process_on_device(self._logits, self._step, every, {})
        return index

    def sample(self) -> SampleOutput:
        """The second half: a token for each row, in the order of ``places``."""
        assert self._step is not None
        errors: dict[int, Exception] = {}
        every = np.arange(len(self.places))
        self._sampler.process_on_host(self._processed, self._rules, every, errors)
        positions = self._step.rows.positions
        lines = torch.arange(len(every), device=positions.device)
        last, tokens = torch.zeros_like(torch.cat((lines, lines[:1]))), torch.empty_like(lines)
        self._sampler.draw(self._processed, self._step.sampling, lines, positions, last, tokens)
        return self._sampler.output_of(self._logits, self._rules, tokens, errors)
