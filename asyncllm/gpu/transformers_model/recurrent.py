"""RecurrentModule: a recurrent module of transformers on the engine's state slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asyncllm.gpu.batch.state_rows import RowSpan, StateRows, span_state
from asyncllm.gpu.transformers_model.attention import CurrentStep
from asyncllm.gpu.transformers_model.recurrent_probe import RecurrentCacheAdapter, RecurrentCall


class RecurrentModule:
    """Splits a module's call on all tokens of a step into calls on the step's rows.

    The call has the hidden states ``[1, T, H]``. Each row is computed with its own states.

    Args:
        forward: the module's own ``forward``, which this object replaces.
        first_state_index: index in StateCache.tensors of the first of the module's states.
    """

    def __init__(
        self,
        step: CurrentStep,
        forward: Callable[..., Tensor],
        call: RecurrentCall,
        first_state_index: int,
    ) -> None:
        self.step, self.forward = step, forward
        self.tensor_indices = {key: first_state_index + i for i, key in enumerate(call.states)}
        self.hidden_parameter = call.hidden_parameter
        self.cache_parameter = call.cache_parameter

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        hidden = args[0] if args else options.pop(self.hidden_parameter)
        # Drop per-token tensors, such as positions: the probe refuses modules that use them.
        options = {name: value for name, value in options.items() if not isinstance(value, Tensor)}
        rows, results = self.step.rows, []
        assert rows is not None
        if rows.slots is not None:
            results.append(self._compute_batch(hidden[0, : len(rows.slots)], rows, options))
        for span in rows.spans:
            results.append(self._compute_row(hidden[:, span.start : span.end], span, options))
        return (results[0] if len(results) == 1 else torch.cat(results)).unsqueeze(0)

    def _compute_batch(self, hidden: Tensor, rows: StateRows, options: dict[str, Any]) -> Tensor:
        """Compute the rows that have one token, all in one call, ``[D, H] -> [D, H]``."""
        slots, states = rows.slots, self.step.states
        assert slots is not None
        row_states = {key: rows.gather(states[index]) for key, index in self.tensor_indices.items()}
        out = self.forward(
            hidden.unsqueeze(1),
            **options | {self.cache_parameter: RecurrentCacheAdapter(row_states)},
        )
        for key, index in self.tensor_indices.items():
            states[index].index_copy_(0, slots, row_states[key])
        return out.squeeze(1)

    def _compute_row(self, hidden: Tensor, span: RowSpan, options: dict[str, Any]) -> Tensor:
        """Compute one row in place on its state slot, ``[1, n, H] -> [n, H]``."""
        states = self.step.states
        row_states = {
            key: span_state(states[index], span) for key, index in self.tensor_indices.items()
        }
        return self.forward(
            hidden, **options | {self.cache_parameter: RecurrentCacheAdapter(row_states)}
        )[0]
