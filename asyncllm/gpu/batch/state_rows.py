"""StateRows: a step's rows for recurrent layers: decode rows as a batch, longer rows singly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from asyncllm.gpu.batch.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Token range and state slot of a row that is computed by itself.

    Attributes:
        start, end: range of the row's tokens in the step.
        slot: slot of the row's states.
        is_fresh: whether the row starts at position 0, without a state.
    """

    start: int
    end: int
    slot: int
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class StateRows:
    """A step's rows for recurrent layers: a batch of D one-token rows, and rows computed singly.

    Attributes:
        slots: ``[D]`` int64, slots of the batch's states; None if there is no batch.
        is_fresh: ``[D]`` bool, whether a row is at position 0; None if no row is.
        spans: the rows outside the batch, in token order; their tokens follow the batch's.
        batch_spans: the D rows as spans, for a recurrence whose states are too large to gather; ()
            on a GPU, where each span would need launches of its own.
    """

    slots: Tensor | None
    is_fresh: Tensor | None
    spans: Sequence[RowSpan]
    batch_spans: Sequence[RowSpan] = ()

    @classmethod
    def of(cls, step: StepInputs) -> StateRows:
        if step.host is None:
            return cls(step.nonnegative_req_indices(), step.positions == 0, ())
        # A lone decode row is computed by itself, so that its state need not be gathered.
        batched = step.num_decodes if step.num_decodes > 1 else 0
        ends, starts, slots = (
            step.host.query_start_loc, step.host.starts, step.host.req_indices,
        )  # fmt: skip
        spans = [
            RowSpan(int(ends[row]), int(ends[row + 1]), int(slots[row]), not starts[row])
            for row in range(step.num_rows)
        ]
        if not batched:
            return cls(None, None, spans)
        is_fresh = None if starts[:batched].all() else step.positions[:batched] == 0
        batch_spans = spans[:batched] if step.positions.device.type == "cpu" else ()
        return cls(step.req_indices[:batched], is_fresh, spans[batched:], batch_spans)

    def gather(self, state: Tensor) -> Tensor:
        """Copies the batch's states from their slots, zeros for fresh rows: ``[D, *shape]``."""
        assert self.slots is not None
        gathered = state.index_select(0, self.slots)
        if self.is_fresh is not None:
            # Use masked_fill: a state of NaN times 0 would stay NaN.
            gathered.masked_fill_(self.is_fresh.view(-1, *[1] * (gathered.dim() - 1)), 0)
        return gathered


def span_state(state: Tensor, span: RowSpan) -> Tensor:
    """View of a span's state in its slot, set to zero for a fresh span: ``[1, *shape]``."""
    row_state = state[span.slot : span.slot + 1]
    return row_state.zero_() if span.is_fresh else row_state
