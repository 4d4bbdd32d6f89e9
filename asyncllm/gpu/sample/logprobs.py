"""token_logprobs, logprobs_of_row: make output objects for log-probabilities."""

from __future__ import annotations

from itertools import starmap

import numpy as np
from torch import Tensor

from asyncllm.outputs import Logprob, TokenLogprobs

MAX_BUFFERED_LOGPROBS = 64
"""Maximum number of log-probabilities per token in a step's buffers. If a request asks for more,
its log-probabilities are computed on the host."""


DEFAULT_NUM_BUFFERED_LOGPROBS = 20
"""Number of log-probabilities per token in a step's buffers if ``max_logprobs`` sets no limit."""


def token_logprobs(
    values: np.ndarray, ids: np.ndarray, sampled_tokens: np.ndarray, top_counts: np.ndarray
) -> list[TokenLogprobs]:
    """Makes a TokenLogprobs from each row of a TopLogprobs.

    Args:
        values, ids: arrays of the TopLogprobs.
        sampled_tokens: ``[S]``.
        top_counts: ``[S]``, number of likeliest tokens to return for each row.
    """
    num_top = values.shape[1] - 1
    packed = np.empty((len(values), 2 * num_top + 3), dtype=np.int32)
    packed[:, 0], packed[:, 1], packed[:, 3::2] = sampled_tokens, ids[:, -1], ids[:, :-1]
    as_floats = packed.view(np.float32)
    as_floats[:, 2], as_floats[:, 4::2] = values[:, -1], values[:, :-1]
    content = packed.tobytes()
    starts = range(0, len(content), 4 * packed.shape[1])
    return [
        TokenLogprobs._from_packed(content[start : start + 8 * count + 12])
        for start, count in zip(starts, top_counts.tolist(), strict=True)
    ]


def logprobs_of_row(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Makes TokenLogprobs with any number of likeliest tokens, from logits ``[vocab_size]``."""
    order = logits.float().log_softmax(-1).sort(descending=True, stable=True)
    values, ids = order.values.tolist(), order.indices.tolist()
    sampled = values[ids.index(token)]
    top = zip(ids[:count], values[:count], range(1, count + 1), strict=False)
    rank = values.index(sampled) + 1
    return TokenLogprobs(Logprob(token, sampled, rank), tuple(starmap(Logprob, top)))
