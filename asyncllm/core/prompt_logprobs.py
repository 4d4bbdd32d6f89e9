"""Prompt log-probabilities: the positions where a step computes them, their cost and collection.

Each chunk of a prompt yields the log-probabilities of its own positions, so they arrive in order. A
position whose KV comes from the prefix cache has no logits. So a request's cached prefix may only
cover positions whose log-probabilities are already known: none at first, more after a preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.core.batch import PromptLogprobSpan, StepResult

if TYPE_CHECKING:
    from asyncllm.core.request import Request
    from asyncllm.core.scheduled_step import ScheduledStep

TOP_LOGPROBS_WORTH_ONE_TOKEN = 32
"""Cost ratio: to make the Python objects of this many top log-probabilities takes about as long as
to compute one token in the model's layers."""


def budget_cost_per_token(request: Request, vocab_size: int) -> int:
    """How many tokens of a step's budget each token of the request's next chunk takes.

    It is 1 for most requests. While prompt log-probabilities are missing, it is 2 (the layers and
    the output head) plus a share for the top log-probabilities. So a step with prompt
    log-probabilities takes as long as any other step."""
    if not request.lacks_prompt_logprobs:
        return 1
    return 2 + _num_top_logprobs(request, vocab_size) // TOP_LOGPROBS_WORTH_ONE_TOKEN


def _num_top_logprobs(request: Request, vocab_size: int) -> int:
    count = request.sampling.prompt_logprobs
    assert count is not None
    return vocab_size if count < 0 else min(count, vocab_size)


def prompt_logprob_spans(step: ScheduledStep, vocab_size: int) -> dict[int, PromptLogprobSpan]:
    """Spans of the rows whose requests still lack prompt log-probabilities. Decode rows, which come
    first in the step, have no span."""
    batch, spans = step.batch, {}
    for row in range(batch.num_decodes, len(batch)):
        request = step.requests[row]
        known = request.prompt_logprobs
        if known is None:
            continue
        start = batch.starts[row]
        # After a preemption the prompt is computed again, but some log-probabilities are already
        # known.
        first = max(start, len(known))
        end = min(start + batch.counts[row], request.num_prompt_tokens - 1)
        if first < end:
            spans[row] = PromptLogprobSpan(first, end, _num_top_logprobs(request, vocab_size))
    return spans


def append_prompt_logprobs(step: ScheduledStep, result: StepResult) -> None:
    """Append a step's prompt log-probabilities to those that its requests already have.

    A request that ended, or was preempted or rolled back, since the launch is skipped, and so is
    one whose reader has dropped its prompt log-probabilities, which were all known. A recurrent
    request that is paused while a step is in flight starts over, and may compute the positions of
    that step again. Each position is kept once."""
    for row, values in result.prompt_logprobs.items():
        request = step.requests[row]
        logprobs = request.prompt_logprobs
        if logprobs is not None and request.epoch == step.epochs[row]:
            logprobs.extend(values[len(logprobs) - step.batch.prompt_logprobs[row].first :])
            if not request.lacks_prompt_logprobs:
                request.budget_cost_per_token = 1
