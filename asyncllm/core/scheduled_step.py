"""ScheduledStep: a step and the requests behind its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncllm.core.batch import StepBatch, StepResult
from asyncllm.core.block_pool import Block
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.request import Request


@dataclass(slots=True)
class ScheduledStep:
    """A step and the requests behind its rows.

    Attributes:
        requests, epochs: request of each row, and the request's epoch. A result counts only if the
            request still has that epoch.
        admitted: requests that got a slot with this step.
        newly_cached_blocks, newly_cached_snapshots: KV blocks and states that entered the prefix
            cache because of this step, and are removed from it if the step fails.
        has_grammar_mask: whether any sampling row has a grammar.
    """

    batch: StepBatch
    requests: list[Request] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    newly_cached_blocks: list[Block] = field(default_factory=list)
    newly_cached_snapshots: list[Block] = field(default_factory=list)
    has_grammar_mask: bool = False

    def order_decodes_first(self) -> None:
        """Move the decode rows to the front, where ``StepBatch`` needs them."""
        batch = self.batch
        rows = range(len(batch))
        decodes = [i for i in rows if batch.counts[i] == 1 and batch.samples[i]]
        if len(decodes) in (0, len(rows)) or decodes[-1] == len(decodes) - 1:
            return
        decode_set = set(decodes)
        order = decodes + [i for i in rows if i not in decode_set]
        self.requests = [self.requests[i] for i in order]
        self.epochs = [self.epochs[i] for i in order]
        batch.req_indices = [batch.req_indices[i] for i in order]
        batch.starts = [batch.starts[i] for i in order]
        batch.counts = [batch.counts[i] for i in order]
        batch.samples = [batch.samples[i] for i in order]

    def masked_rows(self) -> list[int]:
        """Indices of the rows that sample a token under a grammar."""
        samples = self.batch.samples
        return [
            row
            for row, request in enumerate(self.requests)
            if samples[row] and request.structured_output is not None
        ]

    def check_result(self, result: StepResult, info: ExecutorInfo) -> None:
        """Raise ValueError if the result does not fit the step, which means a broken executor."""
        number = self.batch.step
        if result.step != number:
            raise ValueError(f"expected the result of step {number}, got that of {result.step}")
        samples, counts, token_ids = self.batch.samples, result.counts, result.token_ids
        if counts != samples or result.errors:
            self._check_counts(result, info.max_tokens_per_row)
        if self.batch.prompt_logprobs or result.prompt_logprobs:
            self._check_prompt_logprobs(result)
        if len(token_ids) != sum(counts):
            raise ValueError(
                f"step {number} counts {sum(counts)} tokens, its result has {len(token_ids)}"
            )
        vocab_size = info.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            token_id = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise ValueError(
                f"step {number} sampled token {token_id}; the vocabulary has {vocab_size} tokens"
            )

    def _check_counts(self, result: StepResult, max_count: int) -> None:
        """Check each row's number of tokens: 1 to ``max_count`` for a row that was sampled without
        an error, else 0."""
        number, rows = self.batch.step, len(self.requests)
        if len(result.counts) != rows:
            raise ValueError(f"step {number} has {rows} rows, its result {len(result.counts)}")
        for row, count in enumerate(result.counts):
            has_tokens = self.batch.samples[row] and row not in result.errors
            if not (1 <= count <= max_count if has_tokens else count == 0):
                raise ValueError(
                    f"step {number} has {count} tokens in row {row}; expected "
                    f"{f'1 to {max_count}' if has_tokens else 'none'}"
                )

    def _check_prompt_logprobs(self, result: StepResult) -> None:
        expected_counts = {
            row: span.end - span.first
            for row, span in self.batch.prompt_logprobs.items()
            if row not in result.errors
        }
        counts = {row: len(values) for row, values in result.prompt_logprobs.items()}
        if counts != expected_counts:
            raise ValueError(
                f"step {result.step} has prompt log-probabilities of {counts} tokens by row; "
                f"expected {expected_counts}"
            )
