"""Log-probabilities of sampled tokens and of the most likely ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.outputs import Logprob, TokenLogprobs
from asyncllm.sampling_params import MAX_LOGPROBS


def gather_logprobs(
    logits: Tensor, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray
) -> dict[int, TokenLogprobs]:
    """Log-probabilities under the model's own distribution.

    A token's rank is one more than the number of tokens that are more likely.

    Args:
        logits: ``[S, vocab_size]``, as the model gave them.
        rows: rows of ``logits`` that were asked for.
        tokens, counts: of these rows, the sampled token and the length of ``top``.

    Returns:
        By row.
    """
    if not len(rows):
        return {}
    index = torch.from_numpy(rows).to(logits.device)
    chosen = torch.from_numpy(tokens).to(logits.device).unsqueeze(1)
    logprobs = torch.log_softmax(logits[index].float(), -1)
    sampled = logprobs.gather(1, chosen)
    ranks = (logprobs > sampled).sum(-1) + 1
    # Always the same number, because it decides the order of equal logits.
    top, ids = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]))
    result = {}
    values = zip(
        rows.tolist(),
        tokens.tolist(),
        counts.tolist(),
        sampled.squeeze(1).tolist(),
        ranks.tolist(),
        top.tolist(),
        ids.tolist(),
        strict=True,
    )
    for row, token, count, logprob, rank, top_row, id_row in values:
        best = zip(id_row[:count], top_row[:count], strict=True)
        result[row] = TokenLogprobs(
            Logprob(token, logprob, rank),
            tuple(Logprob(i, value, place) for place, (i, value) in enumerate(best, start=1)),
        )
    return result
