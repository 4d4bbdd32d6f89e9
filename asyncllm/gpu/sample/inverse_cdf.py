"""Inverse-CDF sampling of a token per row, from the whole distribution or a truncated one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CANDIDATES = (64, 512, 4096, 32768)
"""Most likely tokens to look at before sorting the whole vocabulary."""


def sample_inverse_cdf(
    logits: Tensor, uniform: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> Tensor:
    """Samples one token per row.

    min_p first, then top_k, then top_p on what is left of the distribution, as in vLLM. How
    a row is computed depends on its own parameters and logits alone, so that its token does
    not depend on the other rows.

    Args:
        logits: ``[S, vocab_size]`` float32, divided by the temperature; overwritten where
            ``min_p`` is set.
        uniform: ``[S]`` in [0, 1).
        top_k: ``[S]``, 0 for all.
        top_p, min_p: ``[S]``.

    Returns:
        ``[S]`` int64 on the device of ``logits``.
    """
    device = logits.device
    vocab_size = logits.shape[1]
    if (min_p > 0.0).any():
        floor = logits.amax(-1) + torch.from_numpy(_log(min_p)).to(device, torch.float32)
        logits = logits.masked_fill_(logits < floor.unsqueeze(1), -torch.inf)
    target = torch.from_numpy(uniform).to(device)
    top_k = np.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    truncated = (top_k < vocab_size) | (top_p < 1.0)
    if not truncated.any():
        return _draw_by_id(logits, target)
    tokens = torch.empty(len(uniform), dtype=torch.int64, device=device)
    whole = np.flatnonzero(~truncated)
    if len(whole):
        rows = torch.from_numpy(whole).to(device)
        tokens[rows] = _draw_by_id(logits[rows], target[rows])
    widths = _widths(top_k, vocab_size)
    for width in np.unique(widths[truncated]).tolist():
        group = np.flatnonzero(truncated & (widths == width))
        rows = torch.from_numpy(group).to(device)
        tokens[rows] = _draw_by_rank(
            logits[rows],
            target[rows],
            torch.from_numpy(top_k[group]).to(device),
            torch.from_numpy(top_p[group]).to(device),
            int(width),
        )
    return tokens


def _log(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(values)


def _widths(top_k: np.ndarray, vocab_size: int) -> np.ndarray:
    """Number of candidates that each row starts with: the fewest that hold its top_k."""
    steps = [width for width in CANDIDATES if width < vocab_size] + [vocab_size]
    bounded = np.where(top_k < vocab_size, top_k, 1)
    return np.array(steps)[np.searchsorted(steps, bounded)]


def _draw_by_id(logits: Tensor, uniform: Tensor) -> Tensor:
    """From the whole distribution, in order of token ids."""
    cumulative = torch.softmax(logits, -1).cumsum(-1, dtype=torch.float64)
    return _invert(cumulative, uniform, cumulative[:, -1])


def _draw_by_rank(
    logits: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, width: int
) -> Tensor:
    """From the most likely tokens, in descending order.

    ``width`` candidates are enough for a row unless it has no top_k and their mass does not
    reach its top_p: such rows start again with the next width.
    """
    vocab_size = logits.shape[1]
    values, ids = torch.topk(logits, width) if width < vocab_size else _sort(logits)
    unlimited = top_k >= vocab_size
    ranks = torch.arange(width, device=logits.device)
    values = values.masked_fill(ranks >= top_k.unsqueeze(1), -torch.inf).double()
    log_mass = values.logsumexp(-1)
    if width < vocab_size:
        log_mass = torch.where(unlimited, logits.logsumexp(-1).double(), log_mass)
    probabilities = (values - log_mass.unsqueeze(1)).exp()
    cumulative = probabilities.cumsum(-1)
    kept = (cumulative - probabilities < top_p.unsqueeze(1)).sum(-1, keepdim=True)
    total = cumulative.gather(1, kept - 1).squeeze(1)
    picks = ids.gather(1, _invert(cumulative, uniform, total).unsqueeze(1)).squeeze(1)
    short = unlimited & (cumulative[:, -1] < top_p)
    if width == vocab_size or not bool(short.any()):
        return picks
    again = short.nonzero().squeeze(1)
    wider = next((w for w in CANDIDATES if width < w < vocab_size), vocab_size)
    picks[again] = _draw_by_rank(logits[again], uniform[again], top_k[again], top_p[again], wider)
    return picks


def _sort(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sort(logits, dim=-1, descending=True, stable=True)


def _invert(cumulative: Tensor, uniform: Tensor, total: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds ``uniform * total``: never one of mass 0."""
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below)
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
