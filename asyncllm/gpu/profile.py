"""profile_run: runs the largest steps, so that their memory can be measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.sampling_inputs import RowsToSample
from asyncllm.gpu.batch.sampling_table import scalar_param_sections
from asyncllm.gpu.batch.sections import BufferSections
from asyncllm.gpu.batch.step_buffer import StepBuffer, StepLimits, make_dummy_batch, step_inputs
from asyncllm.gpu.graph.captures import exclusive_compilation
from asyncllm.gpu.graph.recorded_step import record_step
from asyncllm.gpu.kv_cache import KVCache, KVGroup
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.state_cache import StateCache


def profile_run(
    decoder: LanguageModel,
    groups: Sequence[KVGroup],
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    states: StateCache | None = None,
) -> None:
    """Runs the largest prefill, mixed and decode steps, and samples from their logits.

    Every row has the last tokens of a sequence of ``max_model_len`` tokens. All rows write and read
    the same KV block. They also write the slots of ``states``; a request clears its slot before it
    uses the slot. Call ``decoder.set_max_positions`` first.
    """
    few, weight = decoder.with_few_layers(), decoder.embedding
    cache = KVCache(groups, 1, weight.dtype, weight.device, states)
    specs = [group.spec for group in groups]
    steps = largest_steps(max_num_batched_tokens, max_num_seqs, max_model_len)
    with exclusive_compilation(), torch.inference_mode():
        for num_decodes, counts in steps:
            starts = (max_model_len - counts).tolist()
            batch = make_dummy_batch(starts, counts.tolist(), num_decodes=num_decodes)
            rows = InputBatch(len(counts), max_model_len, specs)
            step = step_inputs(batch, rows, weight.device)
            if num_decodes < len(counts):
                # Compute logits for as many tokens as a step may sample.
                output_indices = torch.arange(
                    min(max_num_seqs, step.num_tokens), device=weight.device
                )
                step = replace(step, output_indices=output_indices, num_logits=len(output_indices))
            _sample_all_rows(decoder, few.forward(step, cache).logits)


def recorded_activation_bytes(
    decoder: LanguageModel,
    groups: Sequence[KVGroup],
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    states: StateCache | None = None,
) -> int:
    """Bytes of the activations of the largest recorded step.

    It is 0 if steps are not recorded, because torch then allocates the activations.
    """
    decoder.set_max_positions(1)
    specs, weight = [group.spec for group in groups], decoder.embedding
    cache = KVCache(groups, 1, weight.dtype, weight.device, states)
    limits = StepLimits(max_num_seqs, max(max_num_seqs, max_num_batched_tokens), len(specs))
    buffer = StepBuffer(limits, torch.device("cpu"))
    found = record_step(decoder, cache, InputBatch(1, 1, specs), buffer)
    return 0 if isinstance(found, str) else found.num_bytes


def largest_steps(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> list[tuple[int, np.ndarray]]:
    """The largest steps, each as its number of decode rows and its tokens per row ``[R]``.

    Decode rows come first. The steps are:

    - no decodes, and the fewest prefill rows of at most ``max_model_len`` tokens that fill the
      token budget;
    - the same number of prefill rows, and as many decodes as possible;
    - decodes alone, as many as possible.
    """
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


def _sample_all_rows(decoder: LanguageModel, logits: torch.Tensor) -> None:
    """Samples every row of ``logits`` with top_k and top_p."""
    count = logits.shape[0]
    rows = torch.arange(count, device=logits.device)
    scalars = BufferSections(scalar_param_sections(count + 1), logits.device).tensors
    scalars["temperature"].fill_(1.0)
    scalars["top_k"].fill_(64)
    scalars["top_p"].fill_(0.9)
    rows_to_sample = RowsToSample(rows, rows, rows.new_empty(count + 1))
    decoder.ops.sample(logits, scalars, rows_to_sample, torch.empty_like(rows))
