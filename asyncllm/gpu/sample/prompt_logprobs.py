"""gather_prompt_logprobs: log-probabilities of prompt tokens, computed from hidden states."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import PromptLogprobSpan, StepBatch
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.sampling_inputs import TopLogprobs
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.sample.logprobs import token_logprobs
from asyncllm.gpu.sample.sample_output import NOT_FINITE_MESSAGE
from asyncllm.outputs import TokenLogprobs

MAX_SLICE_LOGITS = 1 << 24
"""Maximum number of logits in memory at a time, 64 MiB in float32: the logits of a chunk of 8192
tokens would be 5 GB with a vocabulary of 152k."""


def prompt_logprob_tokens(batch: StepBatch, input_batch: InputBatch) -> dict[int, np.ndarray]:
    """Copies, for each row, the token after each position of the row's PromptLogprobSpan."""
    return {
        row: input_batch.token_ids[batch.req_indices[row], span.first + 1 : span.end + 1].copy()
        for row, span in batch.prompt_logprobs.items()
    }


def gather_prompt_logprobs(
    spans: Mapping[int, PromptLogprobSpan],
    tokens: Mapping[int, np.ndarray],
    hidden: Tensor,
    decoder: LanguageModel,
) -> tuple[dict[int, list[TokenLogprobs]], dict[int, Exception]]:
    """Computes prompt log-probabilities; returns them and the errors of failed rows, by row.

    Args:
        spans: prompt positions of each row with prompt log-probabilities.
        tokens: result of ``prompt_logprob_tokens``.
        hidden: hidden states ``[positions, H]`` of all spans, in order.
    """
    logprobs: dict[int, list[TokenLogprobs]] = {}
    errors: dict[int, Exception] = {}
    begin = 0
    for row, span in spans.items():
        end = begin + span.end - span.first
        values = _row_logprobs(hidden[begin:end], tokens[row], span.num_top, decoder)
        if values is None:
            errors[row] = ValueError(NOT_FINITE_MESSAGE)
        else:
            logprobs[row] = values
        begin = end
    return logprobs, errors


def _row_logprobs(
    hidden: Tensor, tokens: np.ndarray, num_top: int, decoder: LanguageModel
) -> list[TokenLogprobs] | None:
    """Computes the log-probabilities of one row in slices; None if logits are not finite."""
    size = max(1, MAX_SLICE_LOGITS // decoder.model.vocab_size)
    logprobs: list[TokenLogprobs] = []
    for begin in range(0, len(tokens), size):
        slice_tokens = tokens[begin : begin + size].astype(np.int64)
        logits = decoder.logits(hidden[begin : begin + size])
        if not bool(torch.isfinite(logits.amax(-1)).all()):
            return None
        top = TopLogprobs(len(slice_tokens), num_top, logits.device)
        decoder.ops.top_logprobs(logits, copy_to_device(slice_tokens, logits.device), top)
        values, ids = top.values.cpu().numpy(), top.ids.cpu().numpy()
        logprobs += token_logprobs(values, ids, slice_tokens, np.full(len(slice_tokens), num_top))
    return logprobs
