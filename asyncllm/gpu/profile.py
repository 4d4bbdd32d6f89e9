"""profile_run: the largest steps, whose memory is measured before the KV cache is sized."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from asyncllm.core.batch import StepBatch
from asyncllm.gpu.batch.decode_inputs import SamplingTensors
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.kv_cache import KVCache, KVGroup
from asyncllm.gpu.models.decoder import Decoder


def profile_run(
    decoder: Decoder,
    groups: Sequence[KVGroup],
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> None:
    """Runs a prefill, a mixed and a decode step, each as large as the scheduler makes them,
    at the end of the longest sequences, and samples from their logits.

    All rows write and read one KV block. Layers have the same shapes and run one after the
    other: the first of each kind, the second and the last have the peak of all of them, in a
    fraction of the time. ``set_max_positions`` comes first.
    """
    few, weight = _with_few_layers(decoder), decoder.embedding
    cache = KVCache(groups, 1, weight.dtype, weight.device)
    with torch.inference_mode():
        for num_decodes, counts in largest_rows(
            max_num_batched_tokens, max_num_seqs, max_model_len
        ):
            inputs = _inputs(
                groups, num_decodes, counts, max_num_seqs, max_model_len, weight.device
            )
            _sample(decoder, few.logits(few.forward(inputs, cache)))


def largest_rows(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> list[tuple[int, np.ndarray]]:
    """Decode rows and tokens per row ``[R]`` of the largest steps, decodes first: the budget
    in prefill rows of at most ``max_model_len``, as many decodes as there may be with prefill
    in what they leave, and as many decodes as there may be."""
    most_rows = min(max_num_seqs, max_num_batched_tokens)
    prefill_rows = min(-(-max_num_batched_tokens // max_model_len), most_rows)
    steps = []
    for num_decodes in sorted({0, most_rows - prefill_rows, most_rows}):
        rows = 0 if num_decodes == most_rows else prefill_rows
        left = min(max_num_batched_tokens - num_decodes, rows * max_model_len)
        full, rest = divmod(left, max_model_len)
        counts = [1] * num_decodes + [max_model_len] * full + [rest] * (rest > 0)
        steps.append((num_decodes, np.array(counts, dtype=np.int64)))
    return steps


def _with_few_layers(decoder: Decoder) -> Decoder:
    layers = decoder.layers
    kinds = [layer.kind for layer in layers]
    kept = {kinds.index(kind) for kind in kinds} | {min(1, len(layers) - 1)}
    few = copy.copy(decoder)
    few.layers = [layers[index] for index in sorted(kept | {len(layers) - 1})]
    return few


def _inputs(
    groups: Sequence[KVGroup],
    num_decodes: int,
    counts: np.ndarray,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
) -> Sequence[ModelInputs]:
    """The step's inputs. As many logits are wanted as sequences can be sampled, whether or
    not this step has as many rows."""
    rows = len(counts)
    batch = StepBatch(
        step=0,
        req_indices=list(range(rows)),
        starts=(max_model_len - counts).tolist(),
        counts=counts.tolist(),
        samples=[True] * rows,
        num_decodes=num_decodes,
    )
    persistent = InputBatch(rows, max_model_len, [group.spec for group in groups])
    tables = [torch.from_numpy(table.table).to(device) for table in persistent.tables]
    inputs = persistent.prepare(batch, device, tables)
    if num_decodes != rows:
        for each in inputs:
            each.logits_indices = torch.arange(min(max_num_seqs, each.num_tokens), device=device)
    return inputs


def _sample(decoder: Decoder, logits: torch.Tensor) -> None:
    """Samples every row, with top_k and top_p at work."""
    count, device = logits.shape[0], logits.device
    req_indices = torch.arange(count, device=device)

    def lines(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count + 1,), value, dtype=dtype, device=device)

    sampling = SamplingTensors(
        states=lines(1, torch.int64),
        temperature=lines(1.0, torch.float32),
        top_k=lines(64, torch.int32),
        top_p=lines(0.9, torch.float32),
        min_p=lines(0.05, torch.float32),
    )
    out = torch.empty_like(req_indices)
    decoder.ops.sample(logits, sampling, req_indices, req_indices, lines(0, torch.int64), out)
