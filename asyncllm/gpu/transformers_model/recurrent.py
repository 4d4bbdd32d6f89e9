"""RecurrentModule: a module of transformers that keeps a state per sequence, on the engine's state
slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.transformers_model.attention import Step
from asyncllm.gpu.transformers_model.call_states import CallStates, StateKey
from asyncllm.gpu.transformers_model.recurrent_probe import RecurrentCall


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Tokens of a row that is computed alone.

    Attributes:
        start, end: of its tokens in the step.
        slot: of its states.
        is_fresh: it starts at position 0, from no state.
    """

    start: int
    end: int
    slot: int
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class StateRows:
    """A step's rows, as recurrent modules compute them: D rows of one token as one batch, and
    each other row alone.

    Attributes:
        slots: ``[D]`` int64; None if there is no such batch.
        is_fresh: ``[D]`` bool, rows at position 0; None if there are none.
        spans: of the other rows, in the order of their tokens, behind the D.
    """

    slots: Tensor | None
    is_fresh: Tensor | None
    spans: Sequence[RowSpan]

    @classmethod
    def of(cls, inputs: ModelInputs | DecodeInputs) -> StateRows:
        if isinstance(inputs, DecodeInputs):
            return cls(inputs.state_indices(), inputs.positions == 0, ())
        # One row alone needs no gathering.
        batched = inputs.num_decodes if inputs.num_decodes > 1 else 0
        ends, starts, slots = inputs.query_start_loc, inputs.starts, inputs.host_req_indices
        spans = [
            RowSpan(int(ends[row]), int(ends[row + 1]), int(slots[row]), not starts[row])
            for row in range(batched, inputs.num_rows)
        ]
        if not batched:
            return cls(None, None, spans)
        is_fresh = None if starts[:batched].all() else inputs.positions[:batched] == 0
        return cls(inputs.req_indices[:batched], is_fresh, spans)


class RecurrentModule:
    """Takes a module's calls, in which all T tokens of a step are one sequence ``[1, T, H]``, and
    makes of them calls for its rows with their own states.

    Args:
        forward: the module's own.
        places: of its states in a StateCache.
    """

    def __init__(
        self,
        step: Step,
        forward: Callable[..., Tensor],
        call: RecurrentCall,
        places: Mapping[StateKey, int],
    ) -> None:
        self.step, self.forward, self.places = step, forward, places
        self.hidden, self.cache = call.hidden, call.cache

    @classmethod
    def install(
        cls, step: Step, module: nn.Module, call: RecurrentCall, places: Mapping[StateKey, int]
    ) -> None:
        """Puts itself in the place of the module's ``forward``."""
        module.__dict__["forward"] = cls(step, module.forward, call, places)

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        hidden = args[0] if args else options.pop(self.hidden)
        # What is per token (positions) it has no parameter for, as the probe has seen.
        options = {name: value for name, value in options.items() if not isinstance(value, Tensor)}
        rows, results = self.step.rows, []
        assert rows is not None
        if rows.slots is not None:
            results.append(self._batch(hidden[0, : len(rows.slots)], rows, options))
        for span in rows.spans:
            results.append(self._alone(hidden[:, span.start : span.end], span, options))
        return (results[0] if len(results) == 1 else torch.cat(results)).unsqueeze(0)

    def _batch(self, hidden: Tensor, rows: StateRows, options: dict[str, Any]) -> Tensor:
        """``[D, H] -> [D, H]``, of rows of one token."""
        slots, states = rows.slots, self.step.states
        assert slots is not None
        held = {key: states[place].index_select(0, slots) for key, place in self.places.items()}
        if rows.is_fresh is not None:
            for state in held.values():
                # A product with 0 would keep what is no number.
                state.masked_fill_(rows.is_fresh.view(-1, *[1] * (state.dim() - 1)), 0)
        out = self.forward(hidden.unsqueeze(1), **options | {self.cache: CallStates(held)})
        for key, place in self.places.items():
            states[place].index_copy_(0, slots, held[key])
        return out.squeeze(1)

    def _alone(self, hidden: Tensor, span: RowSpan, options: dict[str, Any]) -> Tensor:
        """``[1, n, H] -> [n, H]``, on the row's own slot."""
        states, slot = self.step.states, span.slot
        held = {key: states[place][slot : slot + 1] for key, place in self.places.items()}
        if span.is_fresh:
            for state in held.values():
                state.zero_()
        return self.forward(hidden, **options | {self.cache: CallStates(held)})[0]
