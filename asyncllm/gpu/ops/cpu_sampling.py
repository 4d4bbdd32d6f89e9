"""sample: Gumbel-max sampling on a CPU, without a sort of the vocabulary.

It computes ``gumbel.gumbel_sample`` for a few rows at a time, so that the CPU's cache holds their
logits. A row's logits are divided into spans of 32 tokens. To find the tokens that survive
truncation, only the spans with the largest maxima are sorted. Among their tokens, those above the
maximum of every other span are the largest of the row. If truncation may keep further tokens, more
spans are sorted.
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
    chunk_exponential_noise,
    gumbel_keys,
    has_truncation,
    inverse_temperatures,
    sample_in_chunk,
    token_exponential_noise,
    truncation_mask,
)

LOGITS_PER_BLOCK = 2**20
"""Number of logits to process at a time, rounded to whole rows."""

LOGIT_SPAN_TOKENS = 32
"""Tokens per span. Their ids are a constant stride apart, because torch computes maxima over a
strided dimension in a fraction of the time that it takes over adjacent elements."""

SORTED_SPAN_COUNTS = (64, 512)
"""Numbers of spans to sort, tried in turn until the sorted tokens suffice for the draw; in the end
all spans are sorted."""


def sample(
    logits: Tensor, sampling_tensors: Mapping[str, Tensor], rows: RowsToSample, out: Tensor
) -> None:
    """Samples one token per row, see ``TorchOps.sample``.

    A row's token depends on that row alone.
    """
    out.fill_(-1)
    width = -(-logits.shape[1] // CHUNK_TOKENS) * CHUNK_TOKENS
    sampled_rows = torch.nonzero(rows.req_indices >= 0).flatten()
    for block in sampled_rows.split(max(1, LOGITS_PER_BLOCK // width)):
        requests = rows.req_indices[block]
        temperature = sampling_tensors["temperature"][requests]
        scaled_logits = logits.new_full((len(block), width), -torch.inf, dtype=torch.float32)
        factors = inverse_temperatures(temperature).unsqueeze(1)
        torch.mul(logits[block].float(), factors, out=scaled_logits[:, : logits.shape[1]])
        keys = gumbel_keys(sampling_tensors["states"][requests], rows.positions[block] + 1)
        top_k, top_p, min_p = (
            sampling_tensors[name][requests] for name in ("top_k", "top_p", "min_p")
        )
        truncation_params = top_k, top_p, min_p
        tokens = _sample_rows(scaled_logits, keys, temperature, truncation_params, logits.shape[1])
        out[block] = tokens
        rows.last_sampled_tokens[requests] = tokens.clamp(min=0)


def _sample_rows(
    scaled_logits: Tensor,
    keys: Tensor,
    temperature: Tensor,
    truncation_params: tuple[Tensor, Tensor, Tensor],
    vocab_size: int,
) -> Tensor:
    span_max = scaled_logits.view(len(scaled_logits), LOGIT_SPAN_TOKENS, -1).amax(1)
    row_max = span_max.amax(-1)
    is_finite = torch.isfinite(row_max)
    tokens = torch.where(row_max == -torch.inf, NO_TOKEN_LEFT, -1)
    is_greedy = temperature < MIN_TEMPERATURE
    is_truncated = has_truncation(*truncation_params, vocab_size)
    if len(rows := torch.nonzero(is_finite & is_greedy).flatten()):
        tokens[rows] = scaled_logits[rows].argmax(-1)
    is_drawn = is_finite & ~is_greedy
    if len(rows := torch.nonzero(is_drawn & ~is_truncated).flatten()):
        tokens[rows] = _sample_without_truncation(scaled_logits[rows], row_max[rows], keys[rows])
    if len(rows := torch.nonzero(is_drawn & is_truncated).flatten()):
        chosen = truncation_params[0][rows], truncation_params[1][rows], truncation_params[2][rows]
        tokens[rows] = _sample_with_truncation(
            scaled_logits[rows],
            span_max[rows],
            keys[rows],
            chosen,
            vocab_size,
            SORTED_SPAN_COUNTS[0],
        )
    return tokens


def _chunk_masses(scaled_logits: Tensor, row_max: Tensor) -> Tensor:
    """Probability mass of each chunk, ``[R, chunks]``, relative to the largest token's mass."""
    return (
        (scaled_logits - row_max.unsqueeze(1))
        .exp_()
        .view(len(scaled_logits), -1, CHUNK_TOKENS)
        .sum(-1)
    )


def _sample_without_truncation(scaled_logits: Tensor, row_max: Tensor, keys: Tensor) -> Tensor:
    mass = _chunk_masses(scaled_logits, row_max)
    score = mass.log() - chunk_exponential_noise(keys, mass.shape[1]).log()
    return sample_in_chunk(
        scaled_logits.view(len(scaled_logits), -1, CHUNK_TOKENS), score.argmax(-1), keys
    )


def _sample_with_truncation(
    scaled_logits: Tensor,
    span_max: Tensor,
    keys: Tensor,
    truncation_params: tuple[Tensor, Tensor, Tensor],
    vocab_size: int,
    num_spans: int,
) -> Tensor:
    """Samples rows with top_k, top_p or min_p.

    The ``num_spans`` spans with the largest logits are sorted; more only if these do not suffice.
    """
    top_k, top_p, min_p = truncation_params
    sorted_logits, ids, bound = _find_candidates(scaled_logits, span_max, num_spans)
    row_max = sorted_logits[:, 0]
    is_known = sorted_logits > bound.unsqueeze(1)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    is_complete = has_top_k & (is_known.sum(-1) >= top_k)
    is_complete |= row_max + min_p.log() > bound
    total_mass = torch.full_like(row_max, torch.inf, dtype=torch.float64)
    if len(rows := torch.nonzero(~has_top_k & (min_p == 0.0)).flatten()):
        # Without top_k and min_p, top_p is a fraction of the mass of all tokens, not of the
        # candidates.
        total_mass[rows] = _chunk_masses(scaled_logits[rows], row_max[rows]).sum(
            -1, dtype=torch.float64
        )
    sorted_logits = sorted_logits.masked_fill(~is_known, -torch.inf)
    mass = (sorted_logits.double() - row_max.unsqueeze(1)).exp().sum(-1)
    is_complete |= (total_mass < torch.inf) & (mass >= top_p * total_mass)
    is_kept = truncation_mask(sorted_logits, top_k, top_p, min_p, total_mass)
    max_kept = int(is_kept.sum(-1).max())
    is_kept, ids = is_kept[:, :max_kept], ids[:, :max_kept]
    score = sorted_logits[:, :max_kept] - token_exponential_noise(keys, ids).log()
    winner = torch.where(is_kept, score, -torch.inf).argmax(-1, keepdim=True)
    tokens = ids.gather(1, winner).squeeze(1)
    if len(rows := torch.nonzero(~is_complete & (bound > -torch.inf)).flatten()):
        more_spans = next(
            (count for count in SORTED_SPAN_COUNTS if count > num_spans), span_max.shape[1]
        )
        chosen = truncation_params[0][rows], truncation_params[1][rows], truncation_params[2][rows]
        tokens[rows] = _sample_with_truncation(
            scaled_logits[rows], span_max[rows], keys[rows], chosen, vocab_size, more_spans
        )
    return tokens


def _find_candidates(
    scaled_logits: Tensor, span_max: Tensor, num_spans: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the tokens of the ``num_spans`` spans with the largest logits.

    Returns:
        The tokens' logits ``[R, C]``, descending, with equal logits in the order of token ids; the
        ids ``[R, C]``; and the largest logit of the spans that were not sorted ``[R]``.
    """
    count = span_max.shape[1]
    ids = torch.arange(scaled_logits.shape[1], device=scaled_logits.device).expand(
        len(scaled_logits), -1
    )
    bound = scaled_logits.new_full((len(scaled_logits),), -torch.inf)
    if num_spans < count:
        top = span_max.topk(num_spans + 1)
        bound = top.values[:, -1]
        spans = top.indices[:, :num_spans].sort(-1).values
        spread = torch.arange(LOGIT_SPAN_TOKENS, device=scaled_logits.device).unsqueeze(1) * count
        ids = (spread + spans.unsqueeze(1)).flatten(1)
    values, order = scaled_logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order), bound
