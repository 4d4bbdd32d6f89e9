"""Sampler: logits to tokens, for a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import SlotAssignment
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.h2d import upload
from asyncllm.gpu.memory import is_device_failure
from asyncllm.gpu.ops.base import OpSet
from asyncllm.gpu.ops.gumbel import MIN_TEMPERATURE
from asyncllm.gpu.sample.gumbel import RaceSampler
from asyncllm.gpu.sample.inverse_cdf import draw
from asyncllm.gpu.sample.logprobs import gather_logprobs
from asyncllm.gpu.sample.penalties import Penalties
from asyncllm.gpu.sample.rng import uniform
from asyncllm.gpu.sample.sampling_state import SamplingState, SlotRules
from asyncllm.outputs import TokenLogprobs
from asyncllm.validation import describe

NOT_FINITE = "the model's logits are not finite numbers"


@dataclass(slots=True)
class SampleOutput:
    """What was sampled, by row of the logits.

    Attributes:
        token_ids: ``[S]`` int64, -1 where the row is in ``errors``.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)


class Sampler:
    """Samples one token per row, by the parameters of the row's slot.

    Stages, each skipped where nobody asks for it, in vLLM's order: allowed tokens,
    min_tokens, logit_bias, penalties, the request's processors; greedy rows end here with
    the likeliest token; temperature, min_p, top_k, top_p, and a draw keyed by (seed,
    position). Log-probabilities are those of the logits as the model gave them.

    Args:
        ops: draws tokens by the op set's sampler, as steps do that sample on a device without
            the host; None inverts the distribution, which is faster on a CPU.

    Attributes:
        failures: by slot, why its request cannot be sampled.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        inputs: InputBatch,
        device: torch.device,
        ops: OpSet | None = None,
    ) -> None:
        self.inputs = inputs
        self.device = device
        self.state = SamplingState(max_num_seqs)
        self.penalties = Penalties(vocab_size, device)
        self.failures: dict[int, Exception] = {}
        self.race = None if ops is None else RaceSampler(ops, self.state, device)

    def assign(self, assignment: SlotAssignment) -> None:
        """Takes a request's parameters. Its tokens are in the input batch already.

        What raises here is the request's own failure: the slot is left neutral, because steps
        may compute it until the core has been told, and the error goes to ``failures``.
        """
        slot = assignment.slot
        self.release(slot)
        try:
            self.state.assign(assignment)
            if self.state.penalised(np.array([slot]))[0]:
                tokens = np.asarray(assignment.token_ids, dtype=np.int64)
                prompt = assignment.num_prompt_tokens
                self.penalties.assign(slot, tokens[:prompt], tokens[prompt:])
        except Exception as error:
            if is_device_failure(error):
                raise
            self.release(slot)
            self.failures[slot] = error

    def needs_host(self, slots: np.ndarray) -> bool:
        """Whether any of ``slots`` asks for more than the draw: log-probabilities, penalties,
        or rules, which read the tokens so far or the logits on the host."""
        state = self.state
        if state.rules and not state.rules.keys().isdisjoint(slots.tolist()):
            return True
        return bool((state.logprobs[slots] >= 0).any() or state.penalised(slots).any())

    def release(self, slot: int) -> None:
        self.state.release(slot)
        self.penalties.release(slot)
        self.failures.pop(slot, None)

    def sample(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> SampleOutput:
        """Samples a token for each row.

        A row whose logits are not numbers, whose processor raises, or that has no token left
        is an error; the other rows are not affected.

        Args:
            logits: ``[S, vocab_size]``; not changed.
            slots: ``[S]``, no slot twice.
            positions: ``[S]``, where in its sequence the token will be.
        """
        output = SampleOutput(np.empty(0, dtype=np.int64))
        processed = self._process(logits, slots, positions, output.errors)
        if self.race is not None:
            output.token_ids = self.race(processed, slots, positions)
            broken = output.token_ids < 0
        else:
            best, tokens = processed.max(-1)
            output.token_ids = tokens.cpu().numpy()
            broken = ~np.isfinite(best.float().cpu().numpy())
        if broken.any():
            self._explain(logits, processed, np.flatnonzero(broken), output.errors)
        if self.race is None:
            self._draw_random(processed, slots, positions, output)
        if output.errors:
            output.token_ids[list(output.errors)] = -1
        self._finish(logits, slots, output)
        return output

    def _draw_random(
        self, processed: Tensor, slots: np.ndarray, positions: np.ndarray, output: SampleOutput
    ) -> None:
        """Replaces the likeliest tokens of the rows that are not greedy."""
        random = np.flatnonzero(self.state.temperature[slots] >= MIN_TEMPERATURE)
        if output.errors:
            random = np.setdiff1d(random, list(output.errors))
        if len(random):
            output.token_ids[random] = self._draw(processed, random, slots, positions)

    def _process(
        self,
        logits: Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        errors: dict[int, Exception],
    ) -> Tensor:
        """Logits after everything that may change the likeliest token; ``logits`` itself
        where nobody asks for that."""
        penalised = np.flatnonzero(self.state.penalised(slots))
        ruled = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self.state.rules]
        if not len(penalised) and not ruled:
            return logits
        logits = logits.to(torch.float32, copy=True)
        for row, slot in ruled:
            generated = int(positions[row] - self.state.num_prompt_tokens[slot])
            try:
                self._apply_rules(logits[row], self.state.rules[slot], generated)
            except Exception as error:
                if is_device_failure(error):
                    raise
                errors[row] = error
        if len(penalised):
            self.penalties.apply(logits, penalised, slots[penalised], self.state)
        for row, slot in ruled:
            rules = self.state.rules[slot]
            if rules.processors and row not in errors:
                self._apply_processors(logits, row, slot, int(positions[row]), rules, errors)
        return logits

    def _apply_rules(self, row: Tensor, rules: SlotRules, generated: int) -> None:
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
        slot: int,
        position: int,
        rules: SlotRules,
        errors: dict[int, Exception],
    ) -> None:
        output = self.inputs.output_token_ids(slot, position).tolist()
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
        """Says what is wrong with rows whose maximum is no number: it is NaN if any logit
        is, infinite if one is, and minus infinity if no token is left."""
        for row in rows.tolist():
            if row in errors:
                continue
            if not bool(torch.isfinite(logits[row].max())):
                errors[row] = ValueError(NOT_FINITE)
            elif bool(torch.isneginf(processed[row].max())):
                errors[row] = ValueError(
                    "no token is left to sample: allowed_token_ids, min_tokens and logits "
                    "processors exclude all of them"
                )
            else:
                errors[row] = ValueError("a logits processor returned logits that are not finite")

    def _draw(
        self, logits: Tensor, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        state, slots = self.state, slots[rows]
        temperature = self._tensor(state.temperature[slots]).unsqueeze(1)
        chosen = logits if len(rows) == logits.shape[0] else logits[self._tensor(rows)]
        scaled = chosen.float() / temperature
        numbers = uniform(state.seeds[slots], positions[rows])
        tokens = draw(scaled, numbers, state.top_k[slots], state.top_p[slots], state.min_p[slots])
        return tokens.cpu().numpy()

    def _finish(self, logits: Tensor, slots: np.ndarray, output: SampleOutput) -> None:
        """Log-probabilities, and the counts for later penalties."""
        good = output.token_ids >= 0
        asked = np.flatnonzero((self.state.logprobs[slots] >= 0) & good)
        output.logprobs = gather_logprobs(
            logits, asked, output.token_ids[asked], self.state.logprobs[slots[asked]]
        )
        counted = np.flatnonzero(self.state.penalised(slots) & good)
        if len(counted):
            self.penalties.count(slots[counted], output.token_ids[counted])

    def _tensor(self, values: np.ndarray) -> Tensor:
        return upload(values, self.device)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
