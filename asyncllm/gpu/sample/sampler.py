"""Sampler: logits to tokens, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from asyncllm.gpu.sample.batched_processors import BatchedProcessors, Claim
from asyncllm.gpu.sample.host_rules import (
    apply_bias,
    apply_processors,
    hide_bad_words,
    hide_stop_tokens,
)
from asyncllm.gpu.sample.logprobs import logprobs_of_row, token_logprobs
from asyncllm.gpu.sample.sampling_state import HostRules, LineUpdate, SamplingState
from asyncllm.logits_processor import LogitsProcessor
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
        prompt_logprobs: by row of the step.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def take_in(self, places: np.ndarray, other: SampleOutput) -> None:
        """Fills in the rows at ``places``, which ``other`` has."""
        self.token_ids[places] = other.token_ids
        self.logprobs |= {int(places[row]): found for row, found in other.logprobs.items()}
        self.errors |= {int(places[row]): error for row, error in other.errors.items()}


@dataclass(slots=True)
class RuledRow:
    """Rules that the host applies to a row.

    Attributes:
        position: of the sampled token in its sequence.
        output: ``[n]``, the output before it.
    """

    rules: HostRules
    position: int
    output: np.ndarray


@dataclass(slots=True)
class RowRules:
    """Rules of the requests of S rows, a copy apart from their request indices,
    which may have other requests before the rows are sampled.

    Attributes:
        stages, logprobs: ``[S]``, as in SamplingState.
        ruled: by row, of those that need the host.
        host_logprobs: by row, numbers of log-probabilities that no step keeps room for.
        num_changes: of BatchedProcessors, those before this step.
    """

    stages: np.ndarray
    logprobs: np.ndarray
    ruled: dict[int, RuledRow]
    host_logprobs: dict[int, int]
    num_changes: int


@dataclass(slots=True)
class EagerStep:
    """Rows for the eager sampler.

    Attributes:
        sampling: by line.
        rows: on the device.
        masks: of some rows, see GrammarMask, unless ``rows`` have them.
    """

    rules: RowRules
    sampling: SamplingTensors
    rows: SamplingRows
    masks: Mapping[int, bytes] = field(default_factory=dict)


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
        processors: of the engine.

    Attributes:
        tables: lines of the rules and penalties, on ``device``.
        sampling, last_sampled_tokens: by request index, on the host.
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
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.inputs = inputs
        self.batched = BatchedProcessors(processors)
        self.device = device
        self.state = SamplingState(max_num_seqs, vocab_size, min(num_logprobs, vocab_size))
        self.tables = LogitsTables(max_num_seqs, vocab_size, device)
        self.failures: dict[int, Exception] = {}
        self._ops = ops
        self._updates: list[LineUpdate] = []
        self.sampling, self._rules = self.state.tensors()
        self.last_sampled_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device="cpu")

    def assign(self, assignment: RequestAssignment) -> None:
        """Takes over a request's parameters. Its tokens are in the input batch already.

        An error is the request's own: its index is left neutral, because steps may compute it
        until the core has been told, and the error goes to ``failures``.
        """
        req_index = assignment.req_index
        self.release(req_index)
        try:
            update = self.state.assign(assignment)
            if assignment.claimed_by:
                self.state.rules_of(req_index).claim = self.batched.enter(assignment)
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

    def write_updates(self) -> None:
        """Writes them to ``tables``, on a device whose state between steps is the host's."""
        for update in self.take_updates():
            update.write(self.tables)

    def release(self, req_index: int) -> None:
        rules = self.state.host.get(req_index)
        if rules is not None and rules.claim is not None:
            self.batched.leave(rules.claim)
        self.state.release(req_index)
        self.failures.pop(req_index, None)

    def snapshot(self, req_indices: np.ndarray, positions: np.ndarray) -> RowRules:
        """The present rules of the requests of rows.

        Args:
            req_indices: ``[S]``, none twice.
            positions: ``[S]``, of the sampled token in its sequence.
        """
        state = self.state
        rules = RowRules(
            state.stages[req_indices], state.logprobs[req_indices], {}, {}, self.batched.num_changes
        )
        if not state.host and not state.host_logprobs:
            return rules
        for row, req_index in enumerate(req_indices.tolist()):
            if (found := state.host.get(req_index)) is not None:
                position = int(positions[row])
                output = self.inputs.output_token_ids(req_index, position).copy()
                rules.ruled[row] = RuledRow(found, position, output)
            if (count := state.host_logprobs.get(req_index)) is not None:
                rules.host_logprobs[row] = count
        return rules

    def host_step(
        self, req_indices: np.ndarray, positions: np.ndarray, masks: Mapping[int, bytes] = NO_MASKS
    ) -> EagerStep:
        """A step whose state is on the host; see ``snapshot``. Writes the tables."""
        self.write_updates()
        rows = SamplingRows(
            req_indices=torch.from_numpy(req_indices),
            positions=torch.from_numpy(positions - 1),
            host_token_ids=torch.from_numpy(
                self.inputs.token_ids[req_indices, positions - 1].astype(np.int64)
            ),
            last_sampled_tokens=self.last_sampled_tokens,
            rules=self._rules,
            tables=self.tables,
        )
        return EagerStep(self.snapshot(req_indices, positions), self.sampling, rows, masks)

    def sample(self, logits: Tensor, step: EagerStep) -> SampleOutput:
        """Samples a token for each row.

        A row whose logits are not numbers, whose processor raises, or that has no token left
        is an error; the other rows are not affected.

        Args:
            logits: ``[S, vocab_size]``; not changed.
        """
        errors: dict[int, Exception] = {}
        rows, sampling = step.rows, step.sampling
        last = rows.last_sampled_tokens
        chosen = self._rows_to_process(step)
        tokens = torch.full_like(rows.req_indices, -1)
        if not len(chosen):
            self.draw(logits, sampling, rows.req_indices, rows.positions, last, tokens)
        else:
            index = self._tensor(chosen)
            processed = self.process(logits, step, chosen, errors)
            plain = rows.req_indices.clone()
            plain[index] = -1
            if len(chosen) < len(tokens):
                self.draw(logits, sampling, plain, rows.positions, last, tokens)
            some = tokens[index]
            at = rows.req_indices[index], rows.positions[index]
            self.draw(processed, sampling, *at, last, some)
            tokens[index] = some
        return self.output_of(logits, step.rules, tokens, errors)

    def output_of(
        self, logits: Tensor, rules: RowRules, tokens: Tensor, errors: dict[int, Exception]
    ) -> SampleOutput:
        """The sampled tokens, the errors of rows without one, and log-probabilities.

        Args:
            logits: ``[S, vocab_size]``, as the model gave them.
            tokens: ``[S]``, as the draw left them.
            errors: of rows that failed before it.
        """
        # A copy, because the caller keeps it.
        output = SampleOutput(tokens.cpu().numpy().copy(), errors=errors)
        if (output.token_ids < 0).any():
            self._explain(logits, output)
        if errors:
            output.token_ids[list(errors)] = -1
        self._gather_logprobs(logits, rules, output)
        return output

    def needing_logits(self, req_indices: np.ndarray, masked: np.ndarray) -> np.ndarray:
        """``[S]`` bool, by row: False where a request takes its largest logit and needs nothing
        else of them.

        Args:
            masked: places of the rows that a grammar restricts.
        """
        state = self.state
        needed = state.temperature[req_indices] >= MIN_TEMPERATURE
        needed |= state.stages[req_indices] != 0
        needed[state.needing_host(req_indices)] = True
        needed[masked] = True
        return needed

    def _rows_to_process(self, step: EagerStep) -> np.ndarray:
        """Rows that need more than the draw."""
        needed = (step.rules.stages & LOGITS_STAGES.value) != 0
        if step.rules.ruled:
            needed[list(step.rules.ruled)] = True
        needed[list(step.masks)] = True
        return np.flatnonzero(needed)

    def process(
        self, logits: Tensor, step: EagerStep, chosen: np.ndarray, errors: dict[int, Exception]
    ) -> Tensor:
        """``logits[chosen]`` behind all stages up to temperature, float32."""
        raw = logits if len(chosen) == len(logits) else logits[self._tensor(chosen)]
        processed = self.process_on_device(raw, step, chosen, errors)
        self.process_on_host(processed, step.rules, chosen, errors)
        return processed

    def process_on_device(
        self, raw: Tensor, step: EagerStep, chosen: np.ndarray, errors: dict[int, Exception]
    ) -> Tensor:
        """The stages that nothing but the device's state decides on: all but bad words of several
        tokens, and processors. Nothing is read on the host.

        Args:
            raw: ``logits[chosen]``, not changed.
        """
        rows, ruled = step.rows.at(self._tensor(chosen)), step.rules.ruled
        stages = Stages(int(np.bitwise_or.reduce(step.rules.stages[chosen], initial=0)))
        place_of = {row: place for place, row in enumerate(chosen.tolist())}
        if step.masks:
            stages |= Stages.MASKS
            masks = GrammarMasks(len(chosen), raw.shape[1], torch.device("cpu"))
            found = masks.set({place_of[row]: mask for row, mask in step.masks.items()})
            errors |= {int(chosen[place]): error for place, error in found.items()}
            slots, words = masks.slots.to(self.device), masks.words.to(self.device)
            rows = replace(rows, mask_slots=slots, mask_words=words)
        if any(one.rules.bias is not None for one in ruled.values()):
            raw = raw.to(torch.float32, copy=True)
            for row, one in ruled.items():
                apply_bias(raw[place_of[row]], one.rules)
        processed = self._ops.process_logits(raw, rows, stages & LOGITS_STAGES)
        for row, one in ruled.items():
            hide_stop_tokens(processed[place_of[row]], one.rules, one.position)
        return processed

    def process_on_host(
        self, processed: Tensor, rules: RowRules, chosen: np.ndarray, errors: dict[int, Exception]
    ) -> None:
        """The other stages, in place."""
        place_of = {row: place for place, row in enumerate(chosen.tolist())}
        claims: dict[int, Claim] = {}
        for row, one in rules.ruled.items():
            hide_bad_words(processed[place_of[row]], one.rules, one.output)
            if (claim := one.rules.claim) is not None:
                claim.output += one.output[len(claim.output) :].tolist()
                claims[row] = claim
        if claims:
            self.batched.apply(processed, claims, place_of, rules.num_changes, errors)
        for row, one in rules.ruled.items():
            if one.rules.processors and row not in errors:
                try:
                    apply_processors(processed[place_of[row]], one.rules, one.output)
                except Exception as error:
                    errors[row] = error

    def draw(
        self,
        logits: Tensor,
        sampling: SamplingTensors,
        req_indices: Tensor,
        positions: Tensor,
        last_sampled_tokens: Tensor,
        out: Tensor,
    ) -> None:
        """The op set's draw; see ``TorchOps.sample``."""
        self._ops.sample(logits, sampling, req_indices, positions, last_sampled_tokens, out)

    def _explain(self, logits: Tensor, output: SampleOutput) -> None:
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

    def _gather_logprobs(self, logits: Tensor, rules: RowRules, output: SampleOutput) -> None:
        tokens, counts = output.token_ids, rules.logprobs
        asked = np.flatnonzero((counts >= 0) & (tokens >= 0))
        if len(asked):
            top = TopLogprobs(len(asked), self.state.num_logprobs, self.device)
            chosen = logits if len(asked) == len(logits) else logits[self._tensor(asked)]
            self._ops.top_logprobs(chosen, self._tensor(tokens[asked]), top)
            values, ids = top.values.cpu().numpy(), top.ids.cpu().numpy()
            found = token_logprobs(values, ids, tokens[asked], counts[asked])
            output.logprobs.update(zip(asked.tolist(), found, strict=True))
        for row, count in rules.host_logprobs.items():
            if tokens[row] >= 0:
                output.logprobs[row] = logprobs_of_row(logits[row], int(tokens[row]), count)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return copy_to_device(values, self.device)
