"""token_logprobs, logprobs_of_row: make output objects for log-probabilities."""

from __future__ import annotations

from itertools import repeat

import numpy as np
from torch import Tensor

from asyncllm.outputs import Logprob, TokenLogprobs

MAX_BUFFERED_LOGPROBS = 64
"""Maximum number of log-probabilities per token in a step's buffers; further ones are computed on
the host."""


DEFAULT_BUFFERED_LOGPROBS = 20
"""Number of log-probabilities per token in a step's buffers if ``max_logprobs`` sets no limit."""


def token_logprobs(
    values: np.ndarray, ids: np.ndarray, tokens: np.ndarray, counts: np.ndarray
) -> list[TokenLogprobs]:
    """Makes a TokenLogprobs from each row of a TopLogprobs.

    Args:
        values, ids: arrays of the TopLogprobs.
        tokens: ``[S]``, the sampled tokens.
        counts: ``[S]``, number of likeliest tokens to return for each row.
    """
    found = []
    rows = zip(values.tolist(), ids.tolist(), tokens.tolist(), counts.tolist(), strict=True)
    for row, row_ids, token, count in rows:
        best = zip(row_ids[:count], row[:count], range(1, count + 1), strict=True)
        # Bypass Logprob's constructor, which takes twice as long: a prompt needs many Logprobs.
        top = tuple(map(tuple.__new__, repeat(Logprob), best))
        found.append(TokenLogprobs(Logprob(token, row[-1], row_ids[-1]), top))
    return found


def logprobs_of_row(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Makes TokenLogprobs with any number of likeliest tokens, from logits ``[vocab_size]``."""
    order = logits.float().log_softmax(-1).sort(descending=True, stable=True)
    values, ids = order.values.tolist(), order.indices.tolist()
    sampled = values[ids.index(token)]
    top = zip(ids[:count], values[:count], range(1, count + 1), strict=False)
    return TokenLogprobs(
        Logprob(token, sampled, values.index(sampled) + 1), tuple(Logprob(*one) for one in top)
    )
