"""GumbelSampler: the fused Gumbel-max sampler on logits that the eager path modified."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.batch.decode_inputs import SamplingTensors
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.ops.base import OpSet
from asyncllm.gpu.sample.sampling_state import SamplingState


class GumbelSampler:
    """The op set's sampler on the eager path: both paths give the same token."""

    def __init__(self, ops: OpSet, state: SamplingState, device: torch.device) -> None:
        self._ops, self._state, self._device = ops, state, device

    def __call__(
        self, logits: Tensor, req_indices: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """Samples one token per row.

        Args:
            logits: ``[S, vocab_size]``.
            req_indices: ``[S]``, of the parameters.
            positions: ``[S]``, of the sampled token in its sequence.

        Returns:
            ``[S]`` int64; -1 for a row that has NaN or infinity, or no finite logit.
        """
        state, rows = self._state, len(req_indices)
        # Lines are by row here; the last one is for padded rows, of which there are none.
        lines = np.append(req_indices, req_indices[:1])
        sampling = SamplingTensors(
            states=self._upload(state.seeds[lines].view(np.int64)),
            temperature=self._upload(state.temperature[lines]),
            top_k=self._upload(state.top_k[lines]),
            top_p=self._upload(state.top_p[lines].astype(np.float32)),
            min_p=self._upload(state.min_p[lines].astype(np.float32)),
        )
        out = torch.empty(rows, dtype=torch.int64, device=self._device)
        last_sampled_tokens = torch.empty(rows + 1, dtype=torch.int64, device=self._device)
        before = self._upload(positions - 1)
        self._ops.sample(
            logits, sampling, self._upload(np.arange(rows)), before, last_sampled_tokens, out
        )
        return out.cpu().numpy()

    def _upload(self, array: np.ndarray) -> Tensor:
        return copy_to_device(array, self._device)
