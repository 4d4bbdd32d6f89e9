"""Sampling: logits to tokens, for a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import SlotAssignment
from asyncllm.gpu.input_batch import InputBatch
from asyncllm.outputs import TokenLogprobs


@dataclass(slots=True)
class SampleOutput:
    """What was sampled, by row of the logits.

    Attributes:
        token_ids: ``[S]`` int64, -1 where the row is in ``errors``.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)


class Sampler:
    def __init__(self, max_num_seqs: int, vocab_size: int, tokens: InputBatch) -> None:
        self.tokens = tokens

    def assign(self, assignment: SlotAssignment) -> None: ...

    def release(self, slot: int) -> None: ...

    def sample(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> SampleOutput:
        return SampleOutput(torch.argmax(logits, -1).numpy())
