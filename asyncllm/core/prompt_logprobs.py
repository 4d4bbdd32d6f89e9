"""Prompt log-probabilities: the positions that a step computes them at, and their way back.

A chunk of the prompt brings those of its own positions, so that they come in order. A position
whose KV comes from the prefix cache has no logits. So a request takes only as long a prefix from
the cache as it has log-probabilities of: none at first, and more after a preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.core.batch import PromptSpan, StepResult

if TYPE_CHECKING:
    from asyncllm.core.scheduled_step import ScheduledStep


def prompt_spans(step: ScheduledStep, vocab_size: int) -> dict[int, PromptSpan]:
    """The spans of a step's rows, decodes first, whose requests lack log-probabilities."""
    batch, spans = step.batch, {}
    for row in range(batch.num_decodes, len(batch)):
        request = step.requests[row]
        if request.prompt_logprobs is None:
            continue
        start = batch.starts[row]
        # After a preemption the prompt is computed again, and has a part of them already.
        first = max(start, len(request.prompt_logprobs))
        end = min(start + batch.counts[row], request.num_prompt_tokens - 1)
        if first < end:
            count = request.sampling.prompt_logprobs
            assert count is not None
            num_top = vocab_size if count < 0 else min(count, vocab_size)
            spans[row] = PromptSpan(first, end, num_top)
    return spans


def keep_prompt_logprobs(step: ScheduledStep, result: StepResult) -> None:
    """Appends them to the requests that still have the epoch of the step."""
    for row, values in result.prompt_logprobs.items():
        request = step.requests[row]
        if request.epoch == step.epochs[row]:
            assert request.prompt_logprobs is not None
            request.prompt_logprobs.extend(values)
