"""sample: Gumbel-max sampling on a CPU, without a sort of the vocabulary.

It computes ``gumbel.gumbel_sample`` for a few rows at a time, whose logits stay in the CPU's cache.
A row's logits are divided into spans of 32 tokens. To find the tokens that survive truncation, only
the spans with the largest maxima are sorted. Among their tokens, those above the maximum of every
other span are the largest of the row. If truncation may keep further tokens, more spans are sorted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncllm.gpu.batch.sampling_inputs import RowsToSample
from asyncllm.gpu.ops.gumbel import (
    CHUNK_TOKENS,
    MIN_TEMPERATURE,
    NO_TOKEN_LEFT,
    chunk_exponentials,
    gumbel_keys,
    has_truncation,
    sample_in_chunk,
    temperature_factors,
    token_exponentials,
    truncation_mask,
)

LOGITS_PER_BLOCK = 2**20
"""Number of logits to process at a time, rounded to whole rows."""

SPAN_TOKENS = 32
"""Tokens per span, whose ids differ by a constant stride: torch computes maxima over a strided
dimension in a fraction of the time that it takes over adjacent elements."""

SPANS_TO_SORT = (64, 512)
"""How many spans of a row's logits, each of SPAN_TOKENS tokens, to sort: the first number that
suffices for the draw; else all spans."""


def sample(logits: Tensor, sampling: Mapping[str, Tensor], rows: RowsToSample, out: Tensor) -> None:
    """Samples one token per row, see ``TorchOps.sample``.

    A row's token depends on that row alone.
    """
    out.fill_(-1)
    width = -(-logits.shape[1] // CHUNK_TOKENS) * CHUNK_TOKENS
    sampled_rows = torch.nonzero(rows.req_indices >= 0).flatten()
    for block in sampled_rows.split(max(1, LOGITS_PER_BLOCK // width)):
        requests = rows.req_indices[block]
        temperature = sampling["temperature"][requests]
        scaled_logits = logits.new_full((len(block), width), -torch.inf, dtype=torch.float32)
        factors = temperature_factors(temperature).unsqueeze(1)
        torch.mul(logits[block].float(), factors, out=scaled_logits[:, : logits.shape[1]])
        keys = gumbel_keys(sampling["states"][requests], rows.positions[block] + 1)
        top_k, top_p, min_p = (sampling[name][requests] for name in ("top_k", "top_p", "min_p"))
        limits = top_k, top_p, min_p
        tokens = _sample_rows(scaled_logits, keys, temperature, limits, logits.shape[1])
        out[block] = tokens
        rows.last_sampled_tokens[requests] = tokens.clamp(min=0)


def _sample_rows(
    scaled_logits: Tensor,
    keys: Tensor,
    temperature: Tensor,
    limits: tuple[Tensor, Tensor, Tensor],
    vocab_size: int,
) -> Tensor:
    maxima = scaled_logits.view(len(scaled_logits), SPAN_TOKENS, -1).amax(1)
    largest = maxima.amax(-1)
    is_finite = torch.isfinite(largest)
    tokens = torch.where(largest == -torch.inf, NO_TOKEN_LEFT, -1)
    is_greedy = temperature < MIN_TEMPERATURE
    is_truncated = has_truncation(*limits, vocab_size)
    if len(rows := torch.nonzero(is_finite & is_greedy).flatten()):
        tokens[rows] = scaled_logits[rows].argmax(-1)
    is_drawn = is_finite & ~is_greedy
    if len(rows := torch.nonzero(is_drawn & ~is_truncated).flatten()):
        tokens[rows] = _sample_untruncated(scaled_logits[rows], largest[rows], keys[rows])
    if len(rows := torch.nonzero(is_drawn & is_truncated).flatten()):
        chosen = limits[0][rows], limits[1][rows], limits[2][rows]
        tokens[rows] = _sample_truncated(
            scaled_logits[rows], maxima[rows], keys[rows], chosen, vocab_size, SPANS_TO_SORT[0]
        )
    return tokens


def _chunk_mass(scaled_logits: Tensor, largest: Tensor) -> Tensor:
    """Probability mass of each chunk, ``[R, chunks]``, relative to the largest token's mass."""
    return (
        (scaled_logits - largest.unsqueeze(1))
        .exp_()
        .view(len(scaled_logits), -1, CHUNK_TOKENS)
        .sum(-1)
    )


def _sample_untruncated(scaled_logits: Tensor, largest: Tensor, keys: Tensor) -> Tensor:
    mass = _chunk_mass(scaled_logits, largest)
    score = mass.log() - chunk_exponentials(keys, mass.shape[1]).log()
    return sample_in_chunk(
        scaled_logits.view(len(scaled_logits), -1, CHUNK_TOKENS), score.argmax(-1), keys
    )


def _sample_truncated(
    scaled_logits: Tensor,
    maxima: Tensor,
    keys: Tensor,
    limits: tuple[Tensor, Tensor, Tensor],
    vocab_size: int,
    num_spans: int,
) -> Tensor:
    """Samples rows with top_k, top_p or min_p.

    Only the ``num_spans`` spans with the largest logits are sorted, and more if these do not
    suffice.
    """
    top_k, top_p, min_p = limits
    values, ids, bound = _find_candidates(scaled_logits, maxima, num_spans)
    largest = values[:, 0]
    is_known = values > bound.unsqueeze(1)
    limited = (top_k > 0) & (top_k < vocab_size)
    complete = limited & (is_known.sum(-1) >= top_k)
    complete |= largest + min_p.log() > bound
    total = torch.full_like(largest, torch.inf, dtype=torch.float64)
    if len(rows := torch.nonzero(~limited & (min_p == 0.0)).flatten()):
        # Without top_k and min_p, top_p is a fraction of the mass of all tokens, not of the
        # candidates.
        total[rows] = _chunk_mass(scaled_logits[rows], largest[rows]).sum(-1, dtype=torch.float64)
    values = values.masked_fill(~is_known, -torch.inf)
    mass = (values.double() - largest.unsqueeze(1)).exp().sum(-1)
    complete |= (total < torch.inf) & (mass >= top_p * total)
    is_kept = truncation_mask(values, top_k, top_p, min_p, total)
    max_kept = int(is_kept.sum(-1).max())
    is_kept, ids = is_kept[:, :max_kept], ids[:, :max_kept]
    score = values[:, :max_kept] - token_exponentials(keys, ids).log()
    winner = torch.where(is_kept, score, -torch.inf).argmax(-1, keepdim=True)
    tokens = ids.gather(1, winner).squeeze(1)
    if len(rows := torch.nonzero(~complete & (bound > -torch.inf)).flatten()):
        more_spans = next((count for count in SPANS_TO_SORT if count > num_spans), maxima.shape[1])
        chosen = limits[0][rows], limits[1][rows], limits[2][rows]
        tokens[rows] = _sample_truncated(
            scaled_logits[rows], maxima[rows], keys[rows], chosen, vocab_size, more_spans
        )
    return tokens


def _find_candidates(
    scaled_logits: Tensor, maxima: Tensor, num_spans: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the tokens of the ``num_spans`` spans with the largest logits.

    Returns:
        The tokens' logits ``[R, C]``, descending, with equal logits in the order of token ids; the
        ids ``[R, C]``; and the largest logit of the spans that were not sorted ``[R]``.
    """
    count = maxima.shape[1]
    ids = torch.arange(scaled_logits.shape[1], device=scaled_logits.device).expand(
        len(scaled_logits), -1
    )
    bound = scaled_logits.new_full((len(scaled_logits),), -torch.inf)
    if num_spans < count:
        top = maxima.topk(num_spans + 1)
        bound = top.values[:, -1]
        spans = top.indices[:, :num_spans].sort(-1).values
        spread = torch.arange(SPAN_TOKENS, device=scaled_logits.device).unsqueeze(1) * count
        ids = (spread + spans.unsqueeze(1)).flatten(1)
    values, order = scaled_logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order), bound
