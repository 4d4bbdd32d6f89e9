"""warm_up: compiles every kernel that an engine's steps use, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from asyncllm.gpu.batch.grammar_masks import GrammarMasks
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.sampling_inputs import (
    LOGITS_PROCESSING_STAGES,
    LogitsTables,
    SamplingStages,
    TopLogprobs,
)
from asyncllm.gpu.batch.step_buffer import make_dummy_batch, step_inputs
from asyncllm.gpu.graph.cuda_graphs import GraphKey
from asyncllm.gpu.graph.graph_replay import GraphReplay
from asyncllm.gpu.step_runner import StepRunner

NUM_PROMPT_TOKENS = 2
"""Number of tokens of a small prefill."""


def warm_up(runner: StepRunner, replay: GraphReplay, progress: Callable[[int, int], None]) -> None:
    """Runs steps that launch every kernel with every kind of arguments.

    Triton compiles a kernel at its first launch with a new kind of arguments. That takes seconds,
    for which running requests would have to wait. The steps are:

    - a decode step of the smallest and one of the largest bucket;
    - a decode step with balanced attention, if batches can be skewed;
    - sampling with all stages;
    - two small mixed steps, one without a cached prefix and one after the longest cached prefix;
    - a mixed step for each number of tokens at which experts switch to other kernels.

    They run attention both with and without splitting a row's keys among programs: a decode row is
    split in the smallest bucket but not in the mixed step without a prefix, and a prompt is split
    after the longest prefix but not without a prefix. All other kernels are the same for every
    bucket. Rows are padding or write the null block, so that no state is left behind.

    Args:
        progress: called with (steps run, steps in all).
    """
    info = runner.info
    sizes = replay.graphs.buckets or (1, info.max_num_seqs)
    rows = sorted({sizes[0], sizes[-1]})
    steps = [*(partial(replay.run_padded_rows, GraphKey(count)) for count in rows)]
    if replay.has_balanced_attention:
        steps.append(partial(replay.run_padded_rows, GraphKey(rows[-1], has_balanced_splits=True)))
    prefixes = sorted({0, max(0, info.max_model_len - NUM_PROMPT_TOKENS)})
    steps += [partial(_run_sampling_stages, runner)]
    steps += [partial(_run_mixed_step, runner, prefix) for prefix in prefixes]
    steps += [partial(_run_mixed_step, runner, 0, count) for count in _expert_prefill_sizes(runner)]
    progress(0, len(steps))
    for done, step in enumerate(steps, 1):
        step()
        progress(done, len(steps))


def _run_sampling_stages(runner: StepRunner) -> None:
    """Runs all stages of sampling on a padded row, with temporary tables.

    CUDA loads torch's kernels at their first launch. The op ``sample`` is run on the stages'
    float32 logits too: its kernel for float32 is not the one for the model's dtype.
    """
    model, vocab, device = runner.model, runner.info.vocab_size, runner.device
    memory = runner.memory
    logits = torch.zeros((1, vocab), dtype=model.embedding.dtype, device=device)
    masks, tables = GrammarMasks(1, vocab, device), LogitsTables(1, vocab, device)
    tables.allocate(LOGITS_PROCESSING_STAGES)
    rows = replace(
        memory.sampling_rows(1),
        last_sampled_tokens=memory.last_sampled_tokens[:2],
        tables=tables,
        mask_slots=masks.slots,
        mask_words=masks.words,
    )
    processed = model.ops.process_logits(logits, rows, LOGITS_PROCESSING_STAGES)
    runner.sample_logits(processed, SamplingStages.NONE)
    out = TopLogprobs(1, runner.sampler.state.num_logprobs, device)
    model.ops.top_logprobs(logits, memory.sampled_tokens[:1], out)


def _expert_prefill_sizes(runner: StepRunner) -> list[int]:
    """Prefill token counts, one for each expert kernel that smaller steps do not use."""
    info, experts = runner.info, getattr(runner.model.model, "experts", None)
    if experts is None:
        return []
    most = min(info.max_num_batched_tokens, info.max_num_seqs * info.max_model_len)
    sizes = experts.routing.num_experts, experts.routing.top_k
    thresholds = runner.model.ops.expert_kernel_switch_points(*sizes)
    # Subtract one token for the step's decode row.
    return [count - 1 for count in thresholds if NUM_PROMPT_TOKENS < count - 1 < most]


def _run_mixed_step(
    runner: StepRunner, prefix_tokens: int, num_tokens: int = NUM_PROMPT_TOKENS
) -> None:
    """Runs a mixed step of one decode row and prefill rows.

    The prefill rows have ``num_tokens`` tokens in total. The first prefill row follows a cached
    prefix of ``prefix_tokens`` tokens. All rows write and read the null block.
    """
    info = runner.info
    full, rest = divmod(num_tokens, info.max_model_len)
    counts = [1] + [info.max_model_len] * full + [rest] * (rest > 0)
    starts = [0, prefix_tokens] + [0] * (len(counts) - 2)
    batch = make_dummy_batch(starts, counts, num_decodes=1)
    batch.samples[2:] = [False] * (len(counts) - 2)
    rows = InputBatch(len(counts), info.max_model_len, info.kv_groups)
    output = runner.model.forward(step_inputs(batch, rows, runner.device), runner.cache)
    # All rows in the step memory are padding, so sampling writes no token.
    runner.sample_logits(output.logits[: info.max_num_seqs], SamplingStages.NONE)
