"""Sampler: logits to tokens, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import RequestAssignment
from asyncllm.gpu.batch.decode_inputs import SamplingTensors
from asyncllm.gpu.batch.grammar_masks import GrammarMasks
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.sampling_inputs import (
    LOGITS_STAGES,
    LogitsTables,
    SamplingRows,
    Stages,
    TopLogprobs,
)
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.memory import is_device_failure
from asyncllm.gpu.ops.gumbel import MIN_TEMPERATURE, NO_TOKEN_LEFT
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.sample.host_rules import apply_bias, apply_processors, hide_tokens
from asyncllm.gpu.sample.logprobs import logprobs_of_row, token_logprobs
from asyncllm.gpu.sample.sampling_state import LineUpdate, SamplingState
from asyncllm.outputs import TokenLogprobs

NOT_FINITE = "the model's logits are not finite numbers"
NONE_LEFT = (
    "no token is left to sample: the grammar, allowed_token_ids, bad_words, min_tokens and logits "
    "processors exclude all of them"
)
NO_MASKS: Mapping[int, bytes] = MappingProxyType({})


@dataclass(slots=True)
class SampleOutput:
    """Sampled tokens by row of the logits.

    Attributes:
        token_ids: ``[S]`` int64, -1 where the row is in ``errors``.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)


@dataclass(slots=True)
class EagerStep:
    """A step for the eager sampler.

    Attributes:
        req_indices: ``[S]``, none twice.
        positions: ``[S]``, of the sampled token in its sequence.
        sampling, rows: the same on the device.
        masks: of some rows, see GrammarMask.
    """

    req_indices: np.ndarray
    positions: np.ndarray
    sampling: SamplingTensors
    rows: SamplingRows
    masks: Mapping[int, bytes]


def greedy_output(tokens: Tensor) -> SampleOutput:
    """The output for what ``Decoder.argmax`` found, in rows of which nothing is excluded."""
    output = SampleOutput(tokens.numpy())
    for row in np.flatnonzero(output.token_ids < 0).tolist():
        output.errors[row] = ValueError(NOT_FINITE)
        output.token_ids[row] = -1
    return output


class Sampler:
    """The eager sampler: one token per row, by the parameters of its request index.

    Rows that need more than the draw pass through the op set's ``process_logits``, as in a fused
    step, and those with rules of no fixed size through the host; the others are drawn from the
    logits as they are. Log-probabilities are those of the logits as the model gave them.

    Args:
        ops: the op set, which processes logits and draws tokens as in fused steps.
        num_logprobs: per token, in a fused step.

    Attributes:
        tables: lines of the rules and penalties, on ``device``.
        failures: by request index, the error for which it cannot be sampled.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        inputs: InputBatch,
        device: torch.device,
        ops: TorchOps,
        num_logprobs: int = 20,
    ) -> None:
        self.inputs = inputs
        self.device = device
        self.state = SamplingState(max_num_seqs, vocab_size, min(num_logprobs, vocab_size))
        self.tables = LogitsTables(max_num_seqs, vocab_size, device)
        self.failures: dict[int, Exception] = {}
        self._ops = ops
        self._updates: list[LineUpdate] = []
        self._tensors = self.state.tensors()
        self._last_sampled_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device="cpu")

    def assign(self, assignment: RequestAssignment) -> None:
        """Takes over a request's parameters. Its tokens are in the input batch already.

        An error is the request's own: its index is left neutral, because steps may compute it
        until the core has been told, and the error goes to ``failures``.
        """
        req_index = assignment.req_index
        self.release(req_index)
        try:
            update = self.state.assign(assignment)
        except Exception as error:
            if is_device_failure(error):
                raise
            self.release(req_index)
            self.failures[req_index] = error
        else:
            if update is not None:
                self._updates.append(update)

    def take_updates(self) -> list[LineUpdate]:
        """Lines of the tables that were assigned since the last call, to be written ahead of the
        next step."""
        updates, self._updates = self._updates, []
        return updates

    def needs_host(self, req_indices: np.ndarray) -> bool:
        """Whether any of ``req_indices`` has to be sampled by ``sample``."""
        return self.state.needs_host(req_indices)

    def release(self, req_index: int) -> None:
        self.state.release(req_index)
        self.failures.pop(req_index, None)

    def host_step(
        self, req_indices: np.ndarray, positions: np.ndarray, masks: Mapping[int, bytes] = NO_MASKS
    ) -> EagerStep:
        """A step whose state is on the host. Writes the tables."""
        for update in self.take_updates():
            update.write(self.tables)
        sampling, rules = self._tensors
        rows = SamplingRows(
            req_indices=torch.from_numpy(req_indices),
            positions=torch.from_numpy(positions - 1),
            host_token_ids=torch.from_numpy(
                self.inputs.token_ids[req_indices, positions - 1].astype(np.int64)
            ),
            last_sampled_tokens=self._last_sampled_tokens,
            rules=rules,
            tables=self.tables,
        )
        return EagerStep(req_indices, positions, sampling, rows, masks)

    def sample(self, logits: Tensor, step: EagerStep) -> SampleOutput:
        """Samples a token for each row.

        A row whose logits are not numbers, whose processor raises, or that has no token left
        is an error; the other rows are not affected.

        Args:
            logits: ``[S, vocab_size]``; not changed.
        """
        output = SampleOutput(np.empty(0, dtype=np.int64))
        chosen = self._rows_to_process(step)
        tokens = torch.full_like(step.rows.req_indices, -1)
        if not len(chosen):
            self._draw(logits, step, step.rows.req_indices, step.rows.positions, tokens)
        else:
            index = self._tensor(chosen)
            processed = self.process(logits, step, chosen, output.errors)
            plain = step.rows.req_indices.clone()
            plain[index] = -1
            if len(chosen) < len(tokens):
                self._draw(logits, step, plain, step.rows.positions, tokens)
            some = tokens[index]
            self._draw(
                processed, step, step.rows.req_indices[index], step.rows.positions[index], some
            )
            tokens[index] = some
        # A copy, because the caller keeps it.
        output.token_ids = tokens.cpu().numpy().copy()
        if (output.token_ids < 0).any():
            self._explain(logits, step, output)
        if output.errors:
            output.token_ids[list(output.errors)] = -1
        self._gather_logprobs(logits, step, output)
        return output

    def is_greedy(self, req_indices: np.ndarray) -> bool:
        """Whether each of ``req_indices`` takes its largest logit and needs nothing else of them,
        and no lines of the tables wait for a step that writes them."""
        state = self.state
        if self._updates or (state.temperature[req_indices] >= MIN_TEMPERATURE).any():
            return False
        return not state.stages[req_indices].any() and not self.needs_host(req_indices)

    def _rows_to_process(self, step: EagerStep) -> np.ndarray:
        """Rows that need more than the draw."""
        needed = (self.state.stages[step.req_indices] & LOGITS_STAGES.value) != 0
        if self.state.host:
            needed |= np.isin(step.req_indices, list(self.state.host))
        needed[list(step.masks)] = True
        return np.flatnonzero(needed)

    def process(
        self, logits: Tensor, step: EagerStep, chosen: np.ndarray, errors: dict[int, Exception]
    ) -> Tensor:
        """``logits[chosen]`` behind all stages up to temperature, float32."""
        index, all_rows = self._tensor(chosen), step.rows
        stages = self.state.stages_of(step.req_indices[chosen]) & LOGITS_STAGES
        rows = replace(
            all_rows,
            req_indices=all_rows.req_indices[index],
            positions=all_rows.positions[index],
            host_token_ids=all_rows.host_token_ids[index],
        )
        place_of = {row: place for place, row in enumerate(chosen.tolist())}
        if step.masks:
            stages |= Stages.MASKS
            masks = GrammarMasks(len(chosen), logits.shape[1], torch.device("cpu"))
            found = masks.set({place_of[row]: mask for row, mask in step.masks.items()})
            errors |= {int(chosen[place]): error for place, error in found.items()}
            slots, words = masks.slots.to(self.device), masks.words.to(self.device)
            rows = replace(rows, mask_slots=slots, mask_words=words)
        raw = logits if len(chosen) == len(logits) else logits[index]
        ruled = [
            (row, rules, int(step.positions[row]))
            for row, req_index in enumerate(step.req_indices.tolist())
            if (rules := self.state.host.get(req_index)) is not None
        ]
        if any(rules.bias is not None for _, rules, _ in ruled):
            raw = raw.to(torch.float32, copy=True)
            for row, rules, _ in ruled:
                apply_bias(raw[place_of[row]], rules)
        processed = self._ops.process_logits(raw, rows, stages)
        for row, rules, position in ruled:
            output = self.inputs.output_token_ids(int(step.req_indices[row]), position)
            hide_tokens(processed[place_of[row]], rules, output, position)
            if rules.processors and row not in errors:
                try:
                    apply_processors(processed[place_of[row]], rules, output)
                except Exception as error:
                    errors[row] = error
        return processed

    def _draw(
        self,
        logits: Tensor,
        step: EagerStep,
        req_indices: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        last = step.rows.last_sampled_tokens
        self._ops.sample(logits, step.sampling, req_indices, positions, last, out)

    def _explain(self, logits: Tensor, step: EagerStep, output: SampleOutput) -> None:
        """The errors of rows without a token."""
        for row in np.flatnonzero(output.token_ids < 0).tolist():
            if row in output.errors:
                continue
            if not bool(torch.isfinite(logits[row].max())):
                output.errors[row] = ValueError(NOT_FINITE)
            elif output.token_ids[row] == NO_TOKEN_LEFT:
                output.errors[row] = ValueError(NONE_LEFT)
            else:
                output.errors[row] = ValueError(
                    "a logits processor returned logits that are not finite"
                )

    def _gather_logprobs(self, logits: Tensor, step: EagerStep, output: SampleOutput) -> None:
        state, tokens = self.state, output.token_ids
        counts = state.logprobs[step.req_indices]
        asked = np.flatnonzero((counts >= 0) & (tokens >= 0))
        if len(asked):
            top = TopLogprobs(len(asked), state.num_logprobs, self.device)
            chosen = logits if len(asked) == len(logits) else logits[self._tensor(asked)]
            self._ops.top_logprobs(chosen, self._tensor(tokens[asked]), top)
            values, ids = top.values.cpu().numpy(), top.ids.cpu().numpy()
            found = token_logprobs(values, ids, tokens[asked], counts[asked])
            output.logprobs.update(zip(asked.tolist(), found, strict=True))
        for row, req_index in enumerate(step.req_indices.tolist() if state.host_logprobs else ()):
            count = state.host_logprobs.get(req_index)
            if count is not None and tokens[row] >= 0:
                output.logprobs[row] = logprobs_of_row(logits[row], int(tokens[row]), count)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return copy_to_device(values, self.device)
