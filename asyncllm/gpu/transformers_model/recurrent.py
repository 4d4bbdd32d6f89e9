"""RecurrentModule: a module of transformers that keeps a state per sequence, on the engine's state
slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncllm.gpu.batch.state_rows import RowSpan, StateRows, state_of
from asyncllm.gpu.transformers_model.attention import Step
from asyncllm.gpu.transformers_model.call_states import CallStates, StateKey
from asyncllm.gpu.transformers_model.recurrent_probe import RecurrentCall


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
        held = {key: rows.gather(states[place]) for key, place in self.places.items()}
        out = self.forward(hidden.unsqueeze(1), **options | {self.cache: CallStates(held)})
        for key, place in self.places.items():
            states[place].index_copy_(0, slots, held[key])
        return out.squeeze(1)

    def _alone(self, hidden: Tensor, span: RowSpan, options: dict[str, Any]) -> Tensor:
        """``[1, n, H] -> [n, H]``, on the row's own slot."""
        states = self.step.states
        held = {key: state_of(states[place], span) for key, place in self.places.items()}
        return self.forward(hidden, **options | {self.cache: CallStates(held)})[0]
