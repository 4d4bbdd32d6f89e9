"""process_logits, top_logprobs: logits processing and log-probabilities in plain torch.

These functions read nothing on the host, so that CUDA graphs can capture them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from asyncllm.gpu.batch.grammar_masks import mask_logits, unpack_bits
from asyncllm.gpu.batch.sampling_inputs import SamplingRows, SamplingStages, TopLogprobs
from asyncllm.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS

CHUNK_ELEMENTS = 1 << 22
"""Number of logits to process at a time, so that temporary memory does not grow with the batch."""

_BYTES_PER_LOGIT = 20
"""Maximum temporary bytes per logit of a chunk of rows; the penalties need that many."""

_BYTES_PER_BIAS = 64
"""Maximum temporary bytes per entry of a row's ``logit_bias``."""


def process_logits(logits: Tensor, rows: SamplingRows, stages: SamplingStages) -> Tensor:
    """Applies grammar masks, rules and penalties, as ``stages`` selects, to a copy of the logits.

    The order is vLLM's: grammar masks, ``logit_bias``, ``allowed_token_ids`` and ``bad_words``,
    ``min_tokens``, then repetition, frequency and presence penalties. Rows are processed in chunks.

    With PENALTIES, each request's last token is first added to the request's token counts. So the
    counts are up to date, whether the host or the device sampled that token.

    Args:
        logits: ``[S, vocab_size]``, not changed.

    Returns:
        ``[S, vocab_size]`` float32; undefined in rows whose request index is -1.
    """
    processed = logits.to(torch.float32, copy=True)
    if stages & SamplingStages.PENALTIES:
        _add_last_tokens_to_counts(rows.nonnegative_req_indices(), rows)
    for part in _row_chunks(*processed.shape):
        _process_chunk(processed[part], rows.select(part), stages)
    return processed


def logits_processing_bytes(num_rows: int, vocab_size: int) -> int:
    """Maximum bytes that ``process_logits`` allocates for ``num_rows``, its result included."""
    chunk = min(num_rows, _rows_per_chunk(vocab_size))
    result = 4 * num_rows * vocab_size
    return result + chunk * (_BYTES_PER_LOGIT * vocab_size + _BYTES_PER_BIAS * MAX_LOGIT_BIASES)


def _rows_per_chunk(vocab_size: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocab_size)


def _row_chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    step = _rows_per_chunk(vocab_size)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _process_chunk(logits: Tensor, rows: SamplingRows, stages: SamplingStages) -> None:
    """Applies the stages to the logits of a chunk of rows, in place."""
    table_rows = rows.nonnegative_req_indices()
    if stages & SamplingStages.MASKS:
        assert rows.mask_slots is not None
        assert rows.mask_words is not None
        mask_logits(logits, rows.mask_slots, rows.mask_words)
    if stages & SamplingStages.TOKEN_CONSTRAINTS:
        _apply_token_constraints(logits, table_rows, rows)
    if stages & SamplingStages.PENALTIES:
        _apply_penalties(logits, table_rows, rows)


def _apply_token_constraints(logits: Tensor, table_rows: Tensor, rows: SamplingRows) -> None:
    params, tables = rows.params, rows.tables
    entry = torch.arange(MAX_LOGIT_BIASES, device=logits.device)
    active = entry < params["num_bias"][table_rows].unsqueeze(1)
    ids = torch.where(active, tables.bias_ids[table_rows], 0).long()
    logits.scatter_add_(1, ids, torch.where(active, tables.bias_values[table_rows], 0.0))
    allowed = unpack_bits(tables.allowed[table_rows], logits.shape[1])
    allowed |= (params["restricted"][table_rows] == 0).unsqueeze(1)
    logits.masked_fill_(allowed.logical_not_(), -torch.inf)
    before_min_end = rows.positions + 1 < params["min_end"][table_rows]
    active = entry[:MAX_STOP_IDS] < params["num_stop_ids"][table_rows].unsqueeze(1)
    active &= before_min_end.unsqueeze(1)
    ids = torch.where(active, tables.stop_ids[table_rows], 0).long()
    # Inactive entries of ``stop_ids`` get the limit infinity, which leaves their logit unchanged.
    max_logits = torch.where(active, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, ids, max_logits, "amin")


def _add_last_tokens_to_counts(table_rows: Tensor, rows: SamplingRows) -> None:
    counts = rows.tables.counts
    last_tokens = torch.where(
        rows.host_token_ids < 0, rows.last_sampled_tokens[table_rows], rows.host_token_ids
    )
    is_new = (rows.positions >= rows.params["counted_from"][table_rows]) & (rows.req_indices >= 0)
    counts.view(-1).index_add_(
        0, table_rows * counts.shape[1] + last_tokens.clamp(min=0), is_new.to(counts.dtype)
    )


def _apply_penalties(logits: Tensor, table_rows: Tensor, rows: SamplingRows) -> None:
    params, counts = rows.params, rows.tables.counts[table_rows]
    in_output = counts > 0
    in_text = unpack_bits(rows.tables.in_prompt[table_rows], logits.shape[1])
    in_text |= in_output
    repetition = params["repetition"][table_rows].unsqueeze(1)
    scaled = logits * repetition
    torch.where(logits > 0, logits / repetition, scaled, out=scaled)
    torch.where(in_text, scaled, logits, out=logits)
    del scaled, in_text
    logits -= params["frequency"][table_rows].unsqueeze(1) * counts
    logits -= params["presence"][table_rows].unsqueeze(1) * in_output


def top_logprobs(logits: Tensor, tokens: Tensor, out: TopLogprobs) -> None:
    """Writes the top log-probabilities, and the sampled tokens' log-probabilities and ranks.

    A token's rank is one more than the number of tokens that are more likely.

    Args:
        logits: ``[S, vocab_size]``, the model's unprocessed output.
        tokens: ``[S]`` int64, the sampled tokens; the output for a negative one is undefined.
    """
    for part in _row_chunks(*logits.shape):
        wide, chosen = logits[part].float(), tokens[part]
        total = wide.logsumexp(-1, keepdim=True)
        values, ids = wide.topk(out.values.shape[1] - 1)
        sampled = wide.gather(1, chosen.clamp(min=0).unsqueeze(1))
        ranks = (wide > sampled).sum(-1, keepdim=True) + 1
        out.values[part].copy_(torch.cat((values, sampled), -1) - total)
        out.ids[part].copy_(torch.cat((ids, ranks), -1))
