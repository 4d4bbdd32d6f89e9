"""LaunchedStep: a step between launch and collect."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from asyncllm.core.batch import GrammarMask, StepBatch
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.gpu.batch.block_table import EMPTY_INT64
from asyncllm.gpu.batch.host_buffer import BlockTableChange, HostBuffer
from asyncllm.gpu.batch.sampling_inputs import SamplingStages
from asyncllm.gpu.batch.step_buffer import StepSizes
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.models.language_model import StepOutput
from asyncllm.gpu.ops.gumbel import NO_TOKEN_LEFT
from asyncllm.gpu.sample.host_rows import HostRows
from asyncllm.gpu.sample.logprobs import token_logprobs
from asyncllm.gpu.sample.sample_output import NO_TOKEN_MESSAGE, NOT_FINITE_MESSAGE, SampleOutput
from asyncllm.gpu.sample.sampling_state import LogitsTableUpdate
from asyncllm.validation import describe_error


class Event(Protocol):
    """Event at a point of a stream's work, as in CUDA."""

    def synchronize(self) -> None:
        """Waits until all work queued before the event is done."""
        ...


class LaunchedStep:
    """A step between launch and collect.

    Attributes:
        is_decode: whether every row is a decode.
        row_indices, starts: ``[R]`` int64, request index and first position of each row.
        rows: ``[S]``, the sampled rows of the batch, in the order of sampling.
        req_indices, positions: ``[S]``, request index of each sampled row, and the position of its
            new token.
        num_logits: number of sampled rows whose logits are computed. Unless a device has the
            batch, they come first; every other row takes the token of its largest logit.
        num_processed: number of sampled rows whose logits a recorded step processes before
            sampling. They come first among those with logits.
        is_reordered: whether ``rows`` is not in the order of the batch.
        epochs: ``[S]``, epoch of each request index.
        row_stages: ``[S]``, SamplingStages of each sampled row.
        row_logprobs: ``[S]``, number of log-probabilities of each sampled row, -1 for none; empty
            unless ``stages`` has LOGPROBS.
        stages: union of the sampling stages of all rows that are sampled on the device.
        bucket: size of the CUDA graph, padding included: rows of a decode step, tokens of a mixed
            step; None without a graph.
        has_balanced_splits: whether attention splits the keys in proportion to the rows' lengths,
            because these differ much.
        blocks_to_zero: KV blocks to clear before the step runs.
        logits_table_updates: updates of LogitsTables rows, to write before the step runs.
        overflow_block_table_changes: block table changes that do not fit into the buffer.
        masks: grammar masks of the masked rows; None until ``sample`` brings them.
        has_begun: whether the step's changes are applied to the batch, and its work has begun.
        is_sampling_queued: whether all sampling on the device is queued, so that later steps may
            begin.
        is_sampled_apart: whether the native library samples the step in a job of its own, after the
            job of its forward pass.
        buffer, sizes: host buffer of the step's sections, and the sections' sizes; set when the
            step begins.
        inputs: the model's inputs; None if the device derives them.
        output: the model's output; None until the forward pass is queued.
        prompt_hidden: hidden states ``[E, H]`` at the positions of prompt log-probabilities.
        prompt_logprob_tokens: by row, the prompt tokens of its PromptLogprobSpan.
        host_rows: rows whose sampling needs the host.
        event: end of the step's work; None until all of it is queued.
        error: error of the step's work, which ``collect`` raises.
        failures: by row, errors that fail only its request: in sampling parameters, grammar masks
            or prompt log-probabilities.
    """

    buffer: HostBuffer

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        self.is_decode = batch.num_decodes == len(batch)
        self.row_indices = np.array(batch.req_indices, dtype=np.int64)
        self.starts = starts = np.array(batch.starts, dtype=np.int64)
        if self.is_decode:
            self.rows, self.req_indices = np.arange(len(batch)), self.row_indices
            self.positions = starts + 1
        else:
            self.rows = np.flatnonzero(batch.samples)
            self.req_indices = self.row_indices[self.rows]
            self.positions = (starts + np.array(batch.counts, dtype=np.int64))[self.rows]
        self.num_logits = len(self.rows)
        self.num_processed, self.is_reordered = 0, False
        self.epochs = self.blocks_to_zero = self.row_stages = self.row_logprobs = EMPTY_INT64
        self.stages = SamplingStages.NONE
        self.bucket: int | None = None
        self.has_balanced_splits = False
        self.logits_table_updates: list[LogitsTableUpdate] = []
        self.overflow_block_table_changes: list[BlockTableChange] = []
        self.masks: GrammarMask | None = None
        self.has_begun = self.is_sampling_queued = self.is_sampled_apart = False
        self.sizes: StepSizes | None = None
        self.inputs: StepInputs | None = None
        self.output: StepOutput | None = None
        self.prompt_hidden: Tensor | None = None
        self.prompt_logprob_tokens: dict[int, np.ndarray] = {}
        self.host_rows: HostRows | None = None
        self.event: Event | None = None
        self.error: Exception | None = None
        self.failures: dict[int, Exception] = {}

    @property
    def needs_only_plain_sampling(self) -> bool:
        """Whether tokens are sampled from unprocessed logits, on the device alone, and the step has
        no prompt log-probabilities."""
        apart = self.batch.masked_rows or self.stages or self.batch.prompt_logprobs
        return not apart and self.host_rows is None

    @property
    def awaits_masks(self) -> bool:
        return bool(self.batch.masked_rows) and self.masks is None

    def order_rows(self, is_processed: np.ndarray, needs_logits: np.ndarray) -> None:
        """Orders the sampled rows: those with processed logits, with logits, and the greedy ones.

        Args:
            is_processed: ``[S]`` bool, whether a row's logits are processed before sampling.
            needs_logits: ``[S]`` bool, whether a row's logits are needed, as processed ones are.
        """
        self.num_processed = int(np.count_nonzero(is_processed))
        self.num_logits = int(np.count_nonzero(needs_logits))
        counts = self.num_processed, self.num_logits
        self.is_reordered = any(count not in (0, len(self.rows)) for count in counts)
        if self.is_reordered:
            group = np.where(is_processed, 0, np.where(needs_logits, 1, 2))
            order = np.argsort(group, kind="stable")
            self.rows, self.req_indices = self.rows[order], self.req_indices[order]
            self.positions = self.positions[order]

    def awaits_tokens_of(self, step: LaunchedStep) -> bool:
        """Whether this step continues a row whose token the host samples in ``step``."""
        if step.host_rows is None:
            return False
        later = set(self.batch.req_indices).difference(self.batch.released_indices)
        return not later.isdisjoint(step.host_rows.req_indices.tolist())

    def sampled_indices_of(self, rows: list[int]) -> list[int]:
        """Maps row indices of the batch to indices within the sampled rows."""
        place_of = {row: place for place, row in enumerate(self.rows.tolist())}
        return [place_of[row] for row in rows]

    def write_masks(self) -> None:
        """Writes the grammar masks to the buffer; a row whose mask has a wrong length fails."""
        if self.masks is not None:
            errors = self.buffer.grammar_masks.set_masks(self.masks_by_sampled_index())
            self.failures |= {int(self.rows[place]): error for place, error in errors.items()}
            self.stages |= SamplingStages.MASKS

    def masks_by_sampled_index(self) -> dict[int, bytes]:
        """Grammar masks, keyed by the row's index within the sampled rows."""
        if self.masks is None:
            return {}
        return dict(zip(self.sampled_indices_of(self.masks.rows), self.masks.masks, strict=True))

    def read_sample_output(self) -> SampleOutput:
        """Reads tokens, errors and log-probabilities from the buffer.

        For rows that are sampled on the host, the buffer has no valid values.
        """
        tokens = self.buffer.tokens.numpy()[: len(self.rows)].copy()
        output = SampleOutput(tokens)
        failed = tokens < 0
        if self.host_rows is not None:
            failed[self.host_rows.sampled_indices] = False
        if failed.any():
            masked = self.masks_by_sampled_index()
            for place in np.flatnonzero(failed).tolist():
                has_constraints = self.row_stages[place] & SamplingStages.TOKEN_CONSTRAINTS.value
                is_restricted = has_constraints or place in masked
                none_left = tokens[place] == NO_TOKEN_LEFT and is_restricted
                output.errors[place] = ValueError(
                    NO_TOKEN_MESSAGE if none_left else NOT_FINITE_MESSAGE
                )
                tokens[place] = -1
        if self.stages & SamplingStages.LOGPROBS:
            asked = self.row_logprobs >= 0
            if self.host_rows is not None:
                asked[self.host_rows.sampled_indices] = False
            asked = np.flatnonzero(asked & (tokens >= 0))
            top = self.buffer.logprobs
            values, ids = top.values.numpy()[asked], top.ids.numpy()[asked]
            found = token_logprobs(values, ids, tokens[asked], self.row_logprobs[asked])
            output.logprobs = dict(zip(asked.tolist(), found, strict=True))
        return output

    def as_out_of_memory_error(self, error: Exception) -> StepOutOfMemoryError:
        """Makes the error that reports to the core that this step ran out of memory."""
        told = StepOutOfMemoryError(
            f"step {self.batch.step}, {self.batch.num_tokens} tokens: {describe_error(error)}"
        )
        told.__cause__ = error
        return told
