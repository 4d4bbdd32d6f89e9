"""Sampler: samples tokens from logits by the sampling parameters of each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from asyncllm.core.batch import SlotAssignment
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.sampling_inputs import (
    LOGITS_PROCESSING_STAGES,
    SamplingRows,
    SamplingStages,
    TopLogprobs,
)
from asyncllm.gpu.memory import is_device_failure
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.sample.batched_processors import BatchedProcessors
from asyncllm.gpu.sample.sampling_state import LogitsTableUpdate, SamplingState
from asyncllm.logits_processor import LogitsProcessor


class Sampler:
    """Holds the sampling parameters of all request indices, and samples tokens by them.

    Args:
        num_logprobs: log-probabilities per token that a step's buffers hold.
        processors: the engine's processors.

    Attributes:
        ops: the op set, which processes logits and samples tokens.
        failures: by request index, the error that prevents sampling the request.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        input_batch: InputBatch,
        ops: TorchOps,
        num_logprobs: int = 20,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.input_batch, self.ops = input_batch, ops
        self.batched_processors = BatchedProcessors(processors)
        self.state = SamplingState(max_num_seqs, vocab_size, min(num_logprobs, vocab_size))
        self.failures: dict[int, Exception] = {}

    def add_request(self, assignment: SlotAssignment) -> LogitsTableUpdate | None:
        """Stores a request's sampling parameters. Its tokens have to be in the input batch already.

        An error fails this request alone and goes to ``failures``. Its index then gets neutral
        parameters, because steps may compute its rows until the core knows of the error.

        Returns:
            The request's rows of the LogitsTables, to be written before the next step; None if the
            request needs no such rows.
        """
        req_index = assignment.req_index
        self.release(req_index)
        try:
            update = self.state.add_request(assignment)
            if assignment.claiming_processors:
                host_rules = self.state.get_or_add_host_rules(req_index)
                host_rules.request_with_processors = self.batched_processors.add_request(assignment)
        except Exception as error:
            if is_device_failure(error):
                raise
            self.release(req_index)
            self.failures[req_index] = error
            return None
        return update

    def any_row_needs_host(self, req_indices: np.ndarray) -> bool:
        """Whether the host has to sample a row, in a step that excludes bad words itself."""
        return any(
            req_index in self.state.host_logprobs or self._has_processors(req_index)
            for req_index in req_indices[self.state.rows_needing_host(req_indices)].tolist()
        )

    def _has_processors(self, req_index: int) -> bool:
        rules = self.state.host_rules.get(req_index)
        return rules is not None and not rules.has_only_bad_words

    def rows_needing_host(self, req_indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Indices of the rows that a step has to sample on the host: those of
        ``SamplingState.rows_needing_host``, but for rows whose bad words exclude no token now.

        Args:
            positions: position of the token that each row samples. The tokens before it are known
                for requests whose sampling may need the host.
        """
        rows = self.state.rows_needing_host(req_indices)
        if not len(rows):
            return rows
        needing = [self._needs_host(int(req_indices[row]), int(positions[row])) for row in rows]
        return rows[needing]

    def _needs_host(self, req_index: int, position: int) -> bool:
        if req_index in self.state.host_logprobs or self._has_processors(req_index):
            return True
        rules = self.state.host_rules[req_index]
        return bool(rules.excluded_tokens(self.input_batch.output_token_ids(req_index, position)))

    def release(self, req_index: int) -> None:
        rules = self.state.host_rules.get(req_index)
        if rules is not None and rules.request_with_processors is not None:
            self.batched_processors.remove_request(rules.request_with_processors)
        self.state.release(req_index)
        self.failures.pop(req_index, None)

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        scalar_params: Mapping[str, Tensor],
        stages: SamplingStages,
        out_tokens: Tensor,
        out_logprobs: TopLogprobs | None = None,
    ) -> None:
        """Samples a token for each row, by its request index and position.

        A step may call it several times, each for some of its rows. A request has at most one row
        per call.

        Args:
            logits: ``[S, vocab_size]``, not changed.
            scalar_params: the parameters named in SAMPLE_OP_PARAMS, by request index.
            stages: union of the stages that the rows need.
            out_tokens: ``[S]`` int64, output: see ``TorchOps.sample``.
            out_logprobs: output, log-probabilities of the unprocessed logits; filled only if
                ``stages`` has LOGPROBS.
        """
        processed = logits
        if stages & LOGITS_PROCESSING_STAGES:
            processed = self.ops.process_logits(logits, rows, stages)
        self.ops.sample(processed, scalar_params, rows.rows_to_sample(), out_tokens)
        if stages & SamplingStages.LOGPROBS:
            assert out_logprobs is not None
            self.ops.top_logprobs(logits, out_tokens, out_logprobs)
