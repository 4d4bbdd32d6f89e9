"""HostRows: a step's rows that are sampled on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.batch.sampling_inputs import (
    LOGITS_PROCESSING_STAGES,
    RowsToSample,
    SamplingRows,
    SamplingStages,
    TopLogprobs,
)
from asyncllm.gpu.batch.sampling_table import SAMPLE_OP_PARAMS
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.ops.gumbel import NO_TOKEN_LEFT
from asyncllm.gpu.sample.host_rules import RequestWithProcessors, apply_processors
from asyncllm.gpu.sample.logprobs import logprobs_of_row, token_logprobs
from asyncllm.gpu.sample.sample_output import NO_TOKEN_MESSAGE, NOT_FINITE_MESSAGE, SampleOutput
from asyncllm.gpu.sample.sampler import Sampler


class HostRows:
    """K rows of a step that are sampled on the host, in two calls.

    ``copy_inputs`` queues copies of the inputs of sampling behind the forward pass, because the
    next step may run before ``sample`` and give the rows' request indices to other requests.
    ``sample`` applies ``bad_words`` and the logits processors, and samples; call it after the
    step's end.

    Args:
        sampled_indices: ``[K]``, indices of the rows within the step's sampled rows.
        req_indices, positions: ``[K]``, request index and position of each token to sample; all
            tokens before it are known.
    """

    def __init__(
        self,
        sampler: Sampler,
        sampled_indices: np.ndarray,
        req_indices: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        self.sampled_indices, self.req_indices = sampled_indices, req_indices
        self._sampler, state = sampler, sampler.state
        indices, last_positions = req_indices.tolist(), positions.tolist()
        self._stages, self._num_logprobs = state.stages[req_indices], state.logprobs[req_indices]
        self._host_logprobs = [state.host_logprobs.get(index) for index in indices]
        self._rules_by_row = {
            row: state.host_rules[index]
            for row, index in enumerate(indices)
            if index in state.host_rules
        }
        self._outputs_by_row = {
            row: sampler.input_batch.output_token_ids(indices[row], last_positions[row]).copy()
            for row in self._rules_by_row
        }
        self._num_batch_updates = sampler.batched_processors.num_batch_updates
        self._logits = self._processed_logits = self._positions = torch.empty(0)
        self._sample_op_params: dict[str, Tensor] = {}

    def copy_inputs(
        self,
        logits: Tensor,
        rows: SamplingRows,
        scalar_params: Mapping[str, Tensor],
        stages: SamplingStages,
    ) -> Tensor:
        """Queues the copies of the sampling inputs; reads nothing on the host.

        Args:
            logits: ``[S, vocab_size]``, of all sampled rows of the step.
            rows: sampling inputs of all sampled rows of the step.
            scalar_params: the parameters named in SAMPLE_OP_PARAMS, by request index.
            stages: sampling stages of the whole step.

        Returns:
            Indices of the host rows among the sampled rows, on the device.
        """
        index = copy_to_device(self.sampled_indices, logits.device)
        own = rows.select(index)
        # One table row for each sampled row, and one more for padding.
        table_rows = torch.cat((own.nonnegative_req_indices(), own.nonnegative_req_indices()[:1]))
        self._sample_op_params = {
            name: scalar_params[name][table_rows] for name in SAMPLE_OP_PARAMS
        }
        self._logits, self._positions = logits[index], own.positions
        needed = SamplingStages(int(np.bitwise_or.reduce(self._stages))) | (
            stages & SamplingStages.MASKS
        )
        needed &= LOGITS_PROCESSING_STAGES
        self._processed_logits = self._sampler.ops.process_logits(self._logits, own, needed)
        return index

    def sample(self) -> SampleOutput:
        """Samples a token for each of the K rows, in their order."""
        errors: dict[int, Exception] = {}
        self._apply_processors(errors)
        table_rows = torch.arange(len(self.sampled_indices), device=self._positions.device)
        last = table_rows.new_zeros(len(table_rows) + 1)
        tokens = torch.empty_like(table_rows)
        rows_to_sample = RowsToSample(table_rows, self._positions, last)
        self._sampler.ops.sample(
            self._processed_logits, self._sample_op_params, rows_to_sample, tokens
        )
        output = SampleOutput(tokens.cpu().numpy(), errors=errors)
        self._add_errors(output)
        output.token_ids[list(errors)] = -1
        self._gather_logprobs(output)
        return output

    def _apply_processors(self, errors: dict[int, Exception]) -> None:
        """Applies bad words and logits processors in place; adds failed rows to ``errors``."""
        processed, requests = self._processed_logits, dict[int, RequestWithProcessors]()
        for row, rules in self._rules_by_row.items():
            output = self._outputs_by_row[row]
            if excluded := rules.excluded_tokens(output):
                processed[row][excluded] = -torch.inf
            if (request := rules.request_with_processors) is not None:
                request.output += output[len(request.output) :].tolist()
                requests[row] = request
        if requests:
            self._sampler.batched_processors.apply(
                processed, requests, self._num_batch_updates, errors
            )
        for row, rules in self._rules_by_row.items():
            if rules.processors and row not in errors:
                try:
                    apply_processors(processed[row], rules, self._outputs_by_row[row])
                except Exception as error:
                    errors[row] = error

    def _add_errors(self, output: SampleOutput) -> None:
        """Adds an error for each row that has neither a token nor an error."""
        for row in np.flatnonzero(output.token_ids < 0).tolist():
            if row in output.errors:
                continue
            if not bool(torch.isfinite(self._logits[row].max())):
                message = NOT_FINITE_MESSAGE
            elif output.token_ids[row] == NO_TOKEN_LEFT:
                message = NO_TOKEN_MESSAGE
            else:
                message = "a logits processor returned logits that are not finite"
            output.errors[row] = ValueError(message)

    def _gather_logprobs(self, output: SampleOutput) -> None:
        tokens, counts, device = output.token_ids, self._num_logprobs, self._logits.device
        rows = np.flatnonzero((counts >= 0) & (tokens >= 0))
        if len(rows):
            top = TopLogprobs(len(rows), self._sampler.state.num_logprobs, device)
            chosen = self._logits[copy_to_device(rows, device)]
            self._sampler.ops.top_logprobs(chosen, copy_to_device(tokens[rows], device), top)
            values, ids = top.values.cpu().numpy(), top.ids.cpu().numpy()
            logprobs = token_logprobs(values, ids, tokens[rows], counts[rows])
            output.logprobs.update(zip(rows.tolist(), logprobs, strict=True))
        for row, count in enumerate(self._host_logprobs):
            if count is not None and tokens[row] >= 0:
                output.logprobs[row] = logprobs_of_row(self._logits[row], int(tokens[row]), count)
