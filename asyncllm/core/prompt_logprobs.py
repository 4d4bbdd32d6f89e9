"""Prompt log-probabilities: the positions where a step computes them, and their collection.

Each chunk of a prompt yields the log-probabilities of its own positions, so they arrive in order. A
position whose KV comes from the prefix cache has no logits. So a request's cached prefix may only
cover positions whose log-probabilities are already known: none at first, more after a preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.core.batch import PromptSpan, StepResult

if TYPE_CHECKING:
    from asyncllm.core.scheduled_step import ScheduledStep


def prompt_spans(step: ScheduledStep, vocab_size: int) -> dict[int, PromptSpan]:
    """Spans of the rows whose requests still lack prompt log-probabilities. Decode rows, which come
    first in the step, have no span."""
    batch, spans = step.batch, {}
    for row in range(batch.num_decodes, len(batch)):
        request = step.requests[row]
        if request.prompt_logprobs is None:
            continue
        start = batch.starts[row]
        # After a preemption the prompt is computed again, but some log-probabilities are already
        # known.
        first = max(start, len(request.prompt_logprobs))
        end = min(start + batch.counts[row], request.num_prompt_tokens - 1)
        if first < end:
            count = request.sampling.prompt_logprobs
            assert count is not None
            num_top = vocab_size if count < 0 else min(count, vocab_size)
            spans[row] = PromptSpan(first, end, num_top)
    return spans


def keep_prompt_logprobs(step: ScheduledStep, result: StepResult) -> None:
    """Append a step's prompt log-probabilities to the requests whose epoch has not changed.

    A recurrent request that is paused while a step is in flight starts over, and may compute the
    positions of that step again. Each position is kept once."""
    for row, values in result.prompt_logprobs.items():
        request = step.requests[row]
        if request.epoch == step.epochs[row]:
            known = request.prompt_logprobs
            assert known is not None
            known.extend(values[len(known) - step.batch.prompt_logprobs[row].first :])
