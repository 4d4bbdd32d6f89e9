"""SamplingRows: inputs of a step's sampling, except the parameters of the op ``sample``."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.gpu.batch.grammar_masks import num_mask_words
from asyncllm.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS


class SamplingStages(enum.Flag):
    """Optional stages of sampling. LOGPROBS runs after a token is sampled; the other stages process
    the logits before that."""

    NONE = 0
    MASKS = enum.auto()
    """Grammar masks: the tokens that each row's grammar allows."""
    TOKEN_CONSTRAINTS = enum.auto()
    """``logit_bias``, ``allowed_token_ids``, single-token ``bad_words`` and ``min_tokens``."""
    PENALTIES = enum.auto()
    LOGPROBS = enum.auto()


LOGITS_PROCESSING_STAGES = (
    SamplingStages.MASKS | SamplingStages.TOKEN_CONSTRAINTS | SamplingStages.PENALTIES
)


class LogitsTables:
    """Tables that the logits-processing stages read, with a row per request index.

    Tables are allocated when a request first needs them, and then keep their addresses. A row is
    stale unless LOGITS_PROCESSING_PARAMS refer to it. N is ``max_num_seqs``; W is the number of
    words of a mask.

    Attributes:
        allowed: ``[N + 1, W]`` int32, a bit per token that may be sampled.
        bias_ids, bias_values: ``[N + 1, MAX_LOGIT_BIASES]`` int32 and float32, the entries of
            ``logit_bias``.
        stop_ids: ``[N + 1, MAX_STOP_IDS]`` int32, token ids that ``min_tokens`` forbids at first.
        counts: ``[N + 1, vocab_size]`` int32, how often the output has each token.
        in_prompt: ``[N + 1, W]`` int32, a bit per token that the prompt has.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.table_rows, self.vocab_size, self.device = max_num_seqs + 1, vocab_size, device
        self.allocated_stages = SamplingStages.NONE
        self.allowed = self.bias_ids = self.stop_ids = self._zeros(0)
        self.counts = self.in_prompt = self._zeros(0)
        self.bias_values = self._zeros(0, torch.float32)

    def allocate(self, stages: SamplingStages) -> None:
        """Allocates the tables that ``stages`` need and that do not exist yet."""
        words = num_mask_words(self.vocab_size)
        if stages & ~self.allocated_stages & SamplingStages.TOKEN_CONSTRAINTS:
            self.allowed, self.stop_ids = self._zeros(words), self._zeros(MAX_STOP_IDS)
            self.bias_ids = self._zeros(MAX_LOGIT_BIASES)
            self.bias_values = self._zeros(MAX_LOGIT_BIASES, torch.float32)
        if stages & ~self.allocated_stages & SamplingStages.PENALTIES:
            self.counts, self.in_prompt = self._zeros(self.vocab_size), self._zeros(words)
        self.allocated_stages |= stages

    @staticmethod
    def num_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Bytes of all tables."""
        line = 2 * num_mask_words(vocab_size) + vocab_size + 2 * MAX_LOGIT_BIASES + MAX_STOP_IDS
        return 4 * (max_num_seqs + 1) * line

    def _zeros(self, width: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros((self.table_rows, width), dtype=dtype, device=self.device)


class RowsToSample(NamedTuple):
    """Rows that get a token, the argument ``rows`` of an op set's ``sample``.

    Attributes:
        req_indices: ``[S]`` int64, request index of each row; -1 for a padded row.
        positions: ``[S]`` int64, position of the token before the sampled one.
        last_sampled_tokens: output, ``[N + 1]`` int64 by request index: the token sampled for each
            row, or 0 if none could be sampled.
    """

    req_indices: Tensor
    positions: Tensor
    last_sampled_tokens: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling inputs of S sampled rows, for a batch of N request indices.

    Attributes:
        req_indices: ``[S]`` int64; -1 for a row to skip.
        positions: ``[S]`` int64, position of the token before the sampled one.
        host_token_ids: ``[S]`` int64, token at ``positions``; -1 if only ``last_sampled_tokens``
            has it.
        last_sampled_tokens: ``[N + 1]`` int64, by request index.
        params: tensors of LOGITS_PROCESSING_PARAMS by name, ``[N + 1]`` each.
        tables: LogitsTables of rules and penalties, by request index.
        mask_slots, mask_words: see GrammarMasks; None without MASKS.
    """

    req_indices: Tensor
    positions: Tensor
    host_token_ids: Tensor
    last_sampled_tokens: Tensor
    params: Mapping[str, Tensor]
    tables: LogitsTables
    mask_slots: Tensor | None = None
    mask_words: Tensor | None = None

    def nonnegative_req_indices(self) -> Tensor:
        """``[S]`` int64: each row's request index, N for a row to skip."""
        return torch.where(
            self.req_indices < 0, len(self.last_sampled_tokens) - 1, self.req_indices
        )

    def rows_to_sample(self) -> RowsToSample:
        """The rows as RowsToSample, for an op set's ``sample``."""
        return RowsToSample(self.req_indices, self.positions, self.last_sampled_tokens)

    def select(self, index: Tensor | slice) -> SamplingRows:
        """Selects the rows of ``index``: views for a slice, else copies."""
        return replace(
            self,
            req_indices=self.req_indices[index],
            positions=self.positions[index],
            host_token_ids=self.host_token_ids[index],
            mask_slots=None if self.mask_slots is None else self.mask_slots[index],
        )


class TopLogprobs:
    """Buffers for the top log-probabilities of a step's rows, on the device or in host memory.

    Attributes:
        values: ``[N, K + 1]`` float32, log-probabilities of the K likeliest tokens, then that of
            the sampled token.
        ids: ``[N, K + 1]`` int64, the K likeliest tokens, then the sampled token's rank.
    """

    def __init__(
        self, max_num_seqs: int, count: int, device: torch.device, *, pinned: bool = False
    ) -> None:
        shape = (max_num_seqs, count + 1)
        self.values = torch.zeros(shape, dtype=torch.float32, device=device, pin_memory=pinned)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device, pin_memory=pinned)

    def copy_from(self, device_logprobs: TopLogprobs, num_rows: int) -> None:
        """Queues the copy of a step's log-probabilities from the device."""
        self.values[:num_rows].copy_(device_logprobs.values[:num_rows], non_blocking=True)
        self.ids[:num_rows].copy_(device_logprobs.ids[:num_rows], non_blocking=True)
