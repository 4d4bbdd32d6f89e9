"""LaunchedStep: a step between launch and collect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncllm.core.batch import GrammarMask, StepBatch
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.gpu.batch.block_table import NO_BLOCKS
from asyncllm.gpu.batch.sampling_inputs import Stages
from asyncllm.gpu.batch.step_buffers import PinnedStepBuffer
from asyncllm.gpu.graph.streams import Event
from asyncllm.gpu.ops.gumbel import NO_TOKEN_LEFT
from asyncllm.gpu.sample.host_rows import HostRows
from asyncllm.gpu.sample.logprobs import token_logprobs
from asyncllm.gpu.sample.sampler import NONE_LEFT, NOT_FINITE, SampleOutput
from asyncllm.validation import explain

if TYPE_CHECKING:
    from asyncllm.gpu.graph.step_queue import QueuedStep


class LaunchedStep:
    """A step between launch and collect.

    Attributes:
        is_decode: every row is a decode.
        rows: ``[S]``, rows of the batch that are sampled.
        req_indices, positions: ``[S]``, of these rows, and where their tokens will be.
        epochs: ``[S]``, of the request indices.
        blocks_to_zero: KV blocks to clear before it runs.
        masks: of its masked rows, once they have come.
        started: its changes have been applied, and its work queued if it can run ahead.
        queued: of a step that the native library's thread runs.
        host: of a step that runs ahead: its buffer.
        event: its end, once it is queued.
        error: raised when it was to be started.
        failures: by row, errors of requests that could not be assigned.
        row_stages, row_logprobs: ``[S]``, of the request indices: Stages, and how many
            log-probabilities, -1 for none.
        host_rows: of a step that runs ahead, those that are sampled with the host.
        prompt_tokens: by row, the prompt's tokens of its PromptSpan.
    """

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        self.is_decode = batch.num_decodes == len(batch)
        req_indices = np.array(batch.req_indices, dtype=np.int64)
        starts = np.array(batch.starts, dtype=np.int64)
        if self.is_decode:
            self.rows, self.req_indices = np.arange(len(batch)), req_indices
            self.positions = starts + 1
        else:
            self.rows = np.flatnonzero(batch.samples)
            self.req_indices = req_indices[self.rows]
            self.positions = (starts + np.array(batch.counts, dtype=np.int64))[self.rows]
        self.epochs = self.blocks_to_zero = self.row_stages = self.row_logprobs = NO_BLOCKS
        self.masks: GrammarMask | None = None
        self.started = False
        self.queued: QueuedStep | None = None
        self.host: PinnedStepBuffer | None = None
        self.event: Event | None = None
        self.error: Exception | None = None
        self.failures: dict[int, Exception] = {}
        self.host_rows: HostRows | None = None
        self.prompt_tokens: dict[int, np.ndarray] = {}

    @property
    def awaits_masks(self) -> bool:
        return bool(self.batch.masked_rows) and self.masks is None

    @property
    def masked_places(self) -> np.ndarray:
        """Places of the masked rows among those that are sampled."""
        return (
            np.searchsorted(self.rows, self.batch.masked_rows)
            if self.batch.masked_rows
            else NO_BLOCKS
        )

    def awaits_tokens_of(self, step: LaunchedStep) -> bool:
        """Whether it goes on from a token that the host draws in ``step``."""
        if step.host_rows is None:
            return False
        later = set(self.batch.req_indices).difference(self.batch.released)
        return not later.isdisjoint(step.host_rows.req_indices.tolist())

    def masks_by_place(self) -> dict[int, bytes]:
        """The masks by their row's place among those that are sampled."""
        if self.masks is None:
            return {}
        places = np.searchsorted(self.rows, self.masks.rows).tolist()
        return dict(zip(places, self.masks.masks, strict=True))

    def fused_output(self, host: PinnedStepBuffer) -> SampleOutput:
        """Tokens that the device sampled, -1 for the host's rows."""
        tokens = host.tokens[: len(self.rows)].numpy().copy()
        output = SampleOutput(tokens)
        failed, asked = tokens < 0, self.row_logprobs >= 0
        if self.host_rows is not None:
            failed[self.host_rows.places] = asked[self.host_rows.places] = False
        for place in np.flatnonzero(failed).tolist():
            restricted = (
                self.row_stages[place] & Stages.RULES.value or place in self.masks_by_place()
            )
            none_left = tokens[place] == NO_TOKEN_LEFT and restricted
            output.errors[place] = ValueError(NONE_LEFT if none_left else NOT_FINITE)
        asked = np.flatnonzero(asked & (tokens >= 0))
        if len(asked):
            top = host.logprobs
            assert top is not None
            values, ids = top.values.numpy()[asked], top.ids.numpy()[asked]
            found = token_logprobs(values, ids, tokens[asked], self.row_logprobs[asked])
            output.logprobs = dict(zip(asked.tolist(), found, strict=True))
        return output

    def memory_error(self, error: Exception) -> StepOutOfMemoryError:
        """The core's error for running out of memory in this step."""
        told = StepOutOfMemoryError(
            f"step {self.batch.step}, {self.batch.num_tokens} tokens: {explain(error)}"
        )
        told.__cause__ = error
        return told
