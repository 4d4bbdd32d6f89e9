"""process_logits, top_logprobs: sampling's work on logits beside the draw, in plain torch.

They read nothing on the host, so that a CUDA graph may contain them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from asyncllm.gpu.batch.grammar_masks import mask_logits, unpack_bits
from asyncllm.gpu.batch.sampling_inputs import SamplingRows, Stages, TopLogprobs
from asyncllm.sampling_params import MAX_BIAS, MAX_STOP_IDS

CHUNK_ELEMENTS = 1 << 22
"""Logits that the stages process at a time, so that their temporary memory does not grow with the
batch."""

_BYTES_PER_LOGIT = 20
"""Most temporary bytes per logit of a chunk, for counts and both penalised values."""

_BYTES_PER_BIAS = 64
"""Most temporary bytes per entry of a row's ``logit_bias``."""


def process_logits(logits: Tensor, rows: SamplingRows, stages: Stages) -> Tensor:
    """Applies the stages that come before temperature, and returns the processed logits.

    The order is vLLM's: grammar masks, ``logit_bias``, ``allowed_token_ids`` and ``bad_words``,
    ``min_tokens``, then repetition, frequency and presence penalties. Rows are processed in chunks.

    With PENALTIES the token before the sampled one is counted first, so that a request's counts are
    right on every path that samples it.

    Args:
        logits: ``[S, vocab_size]``, not changed.

    Returns:
        ``[S, vocab_size]`` float32; undefined in rows that are left out.
    """
    processed = logits.to(torch.float32, copy=True)
    if stages & Stages.PENALTIES:
        _count(rows.table_rows(), rows)
    for part in _chunks(*processed.shape):
        _process(processed[part], rows.at(part), stages)
    return processed


def processing_bytes(num_rows: int, vocab_size: int) -> int:
    """Most bytes that ``process_logits`` allocates for ``num_rows``, its result included."""
    chunk = min(num_rows, _chunk_rows(vocab_size))
    result = 4 * num_rows * vocab_size
    return result + chunk * (_BYTES_PER_LOGIT * vocab_size + _BYTES_PER_BIAS * MAX_BIAS)


def _chunk_rows(vocab_size: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocab_size)


def _chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    step = _chunk_rows(vocab_size)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _process(logits: Tensor, rows: SamplingRows, stages: Stages) -> None:
    """Applies the stages to a chunk of rows, in place."""
    lines = rows.table_rows()
    if stages & Stages.MASKS:
        assert rows.mask_slots is not None
        assert rows.mask_words is not None
        mask_logits(logits, rows.mask_slots, rows.mask_words)
    if stages & Stages.RULES:
        _apply_rules(logits, lines, rows)
    if stages & Stages.PENALTIES:
        _penalise(logits, lines, rows)


def _apply_rules(logits: Tensor, lines: Tensor, rows: SamplingRows) -> None:
    rules, tables = rows.rules, rows.tables
    entry = torch.arange(MAX_BIAS, device=logits.device)
    active = entry < rules["num_bias"][lines].unsqueeze(1)
    ids = torch.where(active, tables.bias_ids[lines], 0).long()
    logits.scatter_add_(1, ids, torch.where(active, tables.bias_values[lines], 0.0))
    allowed = unpack_bits(tables.allowed[lines], logits.shape[1])
    allowed |= (rules["restricted"][lines] == 0).unsqueeze(1)
    logits.masked_fill_(allowed.logical_not_(), -torch.inf)
    early = rows.positions + 1 < rules["min_end"][lines]
    active = entry[:MAX_STOP_IDS] < rules["num_stop_ids"][lines].unsqueeze(1)
    active &= early.unsqueeze(1)
    ids = torch.where(active, tables.stop_ids[lines], 0).long()
    # The minimum with infinity leaves a logit as it is: inactive entries have no effect.
    floor = torch.where(active, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, ids, floor, "amin")


def _count(lines: Tensor, rows: SamplingRows) -> None:
    counts = rows.tables.counts
    last = torch.where(
        rows.host_token_ids < 0, rows.last_sampled_tokens[lines], rows.host_token_ids
    )
    new = (rows.positions >= rows.rules["counted_from"][lines]) & (rows.req_indices >= 0)
    counts.view(-1).index_add_(0, lines * counts.shape[1] + last.clamp(min=0), new.to(counts.dtype))


def _penalise(logits: Tensor, lines: Tensor, rows: SamplingRows) -> None:
    rules, counts = rows.rules, rows.tables.counts[lines]
    used = counts > 0
    seen = unpack_bits(rows.tables.in_prompt[lines], logits.shape[1])
    seen |= used
    repetition = rules["repetition"][lines].unsqueeze(1)
    scaled = logits * repetition
    torch.where(logits > 0, logits / repetition, scaled, out=scaled)
    torch.where(seen, scaled, logits, out=logits)
    del scaled, seen
    logits -= rules["frequency"][lines].unsqueeze(1) * counts
    logits -= rules["presence"][lines].unsqueeze(1) * used


def top_logprobs(logits: Tensor, tokens: Tensor, out: TopLogprobs) -> None:
    """Writes log-probabilities of the model's own distribution, and the sampled tokens' ranks.

    A rank is one more than the number of more likely tokens.

    Args:
        logits: ``[S, vocab_size]``, the model's unprocessed output.
        tokens: ``[S]`` int64; the output for a negative one is undefined.
    """
    for part in _chunks(*logits.shape):
        wide, chosen = logits[part].float(), tokens[part]
        total = wide.logsumexp(-1, keepdim=True)
        values, ids = wide.topk(out.values.shape[1] - 1)
        sampled = wide.gather(1, chosen.clamp(min=0).unsqueeze(1))
        ranks = (wide > sampled).sum(-1, keepdim=True) + 1
        out.values[part].copy_(torch.cat((values, sampled), -1) - total)
        out.ids[part].copy_(torch.cat((ids, ranks), -1))
