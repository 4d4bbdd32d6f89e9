"""Sampler: logits to tokens, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import RequestAssignment
from asyncllm.gpu.batch.decode_inputs import SamplingTensors
from asyncllm.gpu.batch.grammar_masks import unpack_mask
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.memory import is_device_failure
from asyncllm.gpu.ops.gumbel import MIN_TEMPERATURE
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.sample.inverse_cdf import sample_inverse_cdf
from asyncllm.gpu.sample.logprobs import gather_logprobs
from asyncllm.gpu.sample.penalties import Penalties
from asyncllm.gpu.sample.rng import counter_uniform
from asyncllm.gpu.sample.sampling_state import LogitsRules, SamplingState
from asyncllm.outputs import TokenLogprobs
from asyncllm.validation import describe

NOT_FINITE = "the model's logits are not finite numbers"
NONE_LEFT = (
    "no token is left to sample: the grammar, allowed_token_ids, min_tokens and logits processors "
    "exclude all of them"
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


class Sampler:
    """The eager sampler: one token per row, by the parameters of its request index.

    Stages, each skipped unless a row needs it, in vLLM's order: allowed tokens, min_tokens,
    logit_bias, penalties, the request's processors; greedy rows end here with the likeliest
    token; temperature, min_p, top_k, top_p, and a draw keyed by (seed, position).
    Log-probabilities are those of the logits as the model gave them.

    Args:
        ops: draws tokens by the op set's sampler, as fused steps do; None inverts the
            distribution, which is faster on a CPU.

    Attributes:
        failures: by request index, the error for which it cannot be sampled.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        inputs: InputBatch,
        device: torch.device,
        ops: TorchOps | None = None,
    ) -> None:
        self.inputs = inputs
        self.device = device
        self.state = SamplingState(max_num_seqs)
        self.penalties = Penalties(vocab_size, device)
        self.failures: dict[int, Exception] = {}
        self._ops = ops

    def assign(self, assignment: RequestAssignment) -> None:
        """Takes over a request's parameters. Its tokens are in the input batch already.

        An error is the request's own: its index is left neutral, because steps may compute it
        until the core has been told, and the error goes to ``failures``.
        """
        req_index = assignment.req_index
        self.release(req_index)
        try:
            self.state.assign(assignment)
            if self.state.penalised(np.array([req_index]))[0]:
                tokens = np.asarray(assignment.token_ids, dtype=np.int64)
                prompt = assignment.num_prompt_tokens
                self.penalties.assign(req_index, tokens[:prompt], tokens[prompt:])
        except Exception as error:
            if is_device_failure(error):
                raise
            self.release(req_index)
            self.failures[req_index] = error

    def needs_eager_sampler(self, req_indices: np.ndarray) -> bool:
        """Whether any of ``req_indices`` asks for more than the draw: log-probabilities, penalties,
        or rules, which read the tokens so far or the logits on the host."""
        state = self.state
        if state.rules and not state.rules.keys().isdisjoint(req_indices.tolist()):
            return True
        return bool((state.logprobs[req_indices] >= 0).any() or state.penalised(req_indices).any())

    def release(self, req_index: int) -> None:
        self.state.release(req_index)
        self.penalties.release(req_index)
        self.failures.pop(req_index, None)

    def sample(
        self,
        logits: Tensor,
        req_indices: np.ndarray,
        positions: np.ndarray,
        masks: Mapping[int, bytes] = NO_MASKS,
    ) -> SampleOutput:
        """Samples a token for each row.

        A row whose logits are not numbers, whose processor raises, or that has no token left
        is an error; the other rows are not affected.

        Args:
            logits: ``[S, vocab_size]``; not changed.
            req_indices: ``[S]``, none twice.
            positions: ``[S]``, of the sampled token in its sequence.
            masks: of some rows, see GrammarMask.
        """
        output = SampleOutput(np.empty(0, dtype=np.int64))
        processed = self._process(logits, req_indices, positions, output.errors, masks)
        if self._ops is not None:
            output.token_ids = self._sample_gumbel(self._ops, processed, req_indices, positions)
            broken = output.token_ids < 0
        else:
            best, tokens = processed.max(-1)
            output.token_ids = tokens.cpu().numpy()
            broken = ~np.isfinite(best.float().cpu().numpy())
        if broken.any():
            self._explain(logits, processed, np.flatnonzero(broken), output.errors)
        if self._ops is None:
            self._draw(processed, req_indices, positions, output)
        if output.errors:
            output.token_ids[list(output.errors)] = -1
        self._finish(logits, req_indices, output)
        return output

    def _process(
        self,
        logits: Tensor,
        req_indices: np.ndarray,
        positions: np.ndarray,
        errors: dict[int, Exception],
        masks: Mapping[int, bytes] = NO_MASKS,
    ) -> Tensor:
        """Logits after the stages that may change the likeliest token; ``logits`` itself if no
        row needs one."""
        penalised = np.flatnonzero(self.state.penalised(req_indices))
        ruled = [
            (row, req_index)
            for row, req_index in enumerate(req_indices.tolist())
            if req_index in self.state.rules
        ]
        if not len(penalised) and not ruled and not masks:
            return logits
        logits = logits.to(torch.float32, copy=True)
        for row, mask in masks.items():
            try:
                hidden = ~unpack_mask(mask, logits.shape[1])
            except ValueError as error:
                errors[row] = error
            else:
                logits[row].masked_fill_(self._tensor(hidden), -torch.inf)
        for row, req_index in ruled:
            generated = int(positions[row] - self.state.num_prompt_tokens[req_index])
            try:
                self._apply_rules(logits[row], self.state.rules[req_index], generated)
            except Exception as error:
                if is_device_failure(error):
                    raise
                errors[row] = error
        if len(penalised):
            self.penalties.apply(logits, penalised, req_indices[penalised], self.state)
        for row, req_index in ruled:
            rules = self.state.rules[req_index]
            if rules.processors and row not in errors:
                self._apply_processors(logits, row, req_index, int(positions[row]), rules, errors)
        return logits

    def _apply_rules(self, row: Tensor, rules: LogitsRules, generated: int) -> None:
        if rules.allowed is not None:
            hidden = torch.ones_like(row, dtype=torch.bool)
            hidden[self._tensor(rules.allowed)] = False
            row.masked_fill_(hidden, -torch.inf)
        if generated < rules.min_tokens and len(rules.stop_ids):
            row[self._tensor(rules.stop_ids)] = -torch.inf
        if rules.bias is not None:
            ids, values = rules.bias
            row[self._tensor(ids)] += self._tensor(values)

    def _apply_processors(
        self,
        logits: Tensor,
        row: int,
        req_index: int,
        position: int,
        rules: LogitsRules,
        errors: dict[int, Exception],
    ) -> None:
        output = self.inputs.output_token_ids(req_index, position).tolist()
        value: object = logits[row].clone()
        try:
            for processor in rules.processors:
                value = processor(output, value)
                if not isinstance(value, Tensor) or value.shape != logits.shape[1:]:
                    raise TypeError(
                        f"logits processor {describe(processor)} returned {_kind(value)}, expected "
                        f"a tensor of shape {tuple(logits.shape[1:])}"
                    )
            logits[row] = value  # pyright: ignore[reportArgumentType]
        except Exception as error:
            errors[row] = error
        except BaseException as error:
            # No signal is delivered on this thread: an exit or an interrupt is the
            # processor's own, and ends neither the thread nor the process.
            errors[row] = RuntimeError(f"a logits processor raised {describe(error)}")
            errors[row].__cause__ = error

    def _explain(
        self, logits: Tensor, processed: Tensor, rows: np.ndarray, errors: dict[int, Exception]
    ) -> None:
        """The errors of rows whose maximum is not finite: it is NaN if any logit is, infinite if
        one is, and minus infinity if no token is left."""
        for row in rows.tolist():
            if row in errors:
                continue
            if not bool(torch.isfinite(logits[row].max())):
                errors[row] = ValueError(NOT_FINITE)
            elif bool(torch.isneginf(processed[row].max())):
                errors[row] = ValueError(NONE_LEFT)
            else:
                errors[row] = ValueError("a logits processor returned logits that are not finite")

    def _sample_gumbel(
        self, ops: TorchOps, logits: Tensor, req_indices: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """Tokens of the op set's sampler, as a fused step draws them; -1 for a row that has NaN or
        infinity, or no finite logit."""
        state, rows = self.state, len(req_indices)
        # Parameters are by row here; the last line is for padded rows, of which there are none.
        lines = np.append(req_indices, req_indices[:1])
        sampling = SamplingTensors(
            states=self._tensor(state.seeds[lines].view(np.int64)),
            temperature=self._tensor(state.temperature[lines]),
            top_k=self._tensor(state.top_k[lines]),
            top_p=self._tensor(state.top_p[lines].astype(np.float32)),
            min_p=self._tensor(state.min_p[lines].astype(np.float32)),
        )
        row_indices, before = self._tensor(np.arange(rows)), self._tensor(positions - 1)
        last_sampled_tokens, out = row_indices.new_empty(rows + 1), torch.empty_like(row_indices)
        ops.sample(logits, sampling, row_indices, before, last_sampled_tokens, out)
        return out.cpu().numpy()

    def _draw(
        self, logits: Tensor, req_indices: np.ndarray, positions: np.ndarray, output: SampleOutput
    ) -> None:
        """Replaces the likeliest tokens of the rows that are not greedy."""
        state = self.state
        rows = np.flatnonzero(state.temperature[req_indices] >= MIN_TEMPERATURE)
        if output.errors:
            rows = np.setdiff1d(rows, list(output.errors))
        if not len(rows):
            return
        req_indices = req_indices[rows]
        chosen = logits if len(rows) == logits.shape[0] else logits[self._tensor(rows)]
        tokens = sample_inverse_cdf(
            chosen.float() / self._tensor(state.temperature[req_indices]).unsqueeze(1),
            counter_uniform(state.seeds[req_indices], positions[rows]),
            state.top_k[req_indices],
            state.top_p[req_indices],
            state.min_p[req_indices],
        )
        output.token_ids[rows] = tokens.cpu().numpy()

    def _finish(self, logits: Tensor, req_indices: np.ndarray, output: SampleOutput) -> None:
        """Log-probabilities, and the counts for later penalties."""
        good = output.token_ids >= 0
        asked = np.flatnonzero((self.state.logprobs[req_indices] >= 0) & good)
        output.logprobs = gather_logprobs(
            logits, asked, output.token_ids[asked], self.state.logprobs[req_indices[asked]]
        )
        counted = np.flatnonzero(self.state.penalised(req_indices) & good)
        if len(counted):
            self.penalties.count(req_indices[counted], output.token_ids[counted])

    def _tensor(self, values: np.ndarray) -> Tensor:
        return copy_to_device(values, self.device)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
