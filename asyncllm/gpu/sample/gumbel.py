"""RaceSampler: draws rows whose logits the host has changed, as a GPU's fast path draws them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.batch.decode_inputs import SlotSampling
from asyncllm.gpu.h2d import upload
from asyncllm.gpu.ops.base import OpSet
from asyncllm.gpu.sample.sampling_state import SamplingState


class RaceSampler:
    """The op set's sampler on any rows: the same logits give the same token on either path."""

    def __init__(self, ops: OpSet, state: SamplingState, device: torch.device) -> None:
        self._ops, self._state, self._device = ops, state, device

    def __call__(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Samples one token per row.

        Args:
            logits: ``[S, vocab_size]``.
            slots: ``[S]``, whose parameters count.
            positions: ``[S]``, where in its sequence the token will be.

        Returns:
            ``[S]`` int64; -1 for a row that has NaN or infinity, or no finite logit.
        """
        state, rows = self._state, len(slots)
        # Lines are by row here; the last one is for padded rows, of which there are none.
        lines = np.append(slots, slots[:1])
        sampling = SlotSampling(
            states=self._upload(state.seeds[lines].view(np.int64)),
            temperature=self._upload(state.temperature[lines]),
            top_k=self._upload(state.top_k[lines]),
            top_p=self._upload(state.top_p[lines].astype(np.float32)),
            min_p=self._upload(state.min_p[lines].astype(np.float32)),
        )
        out = torch.empty(rows, dtype=torch.int64, device=self._device)
        last_tokens = torch.empty(rows + 1, dtype=torch.int64, device=self._device)
        before = self._upload(positions - 1)
        self._ops.sample(logits, sampling, self._upload(np.arange(rows)), before, last_tokens, out)
        return out.cpu().numpy()

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self._device)
