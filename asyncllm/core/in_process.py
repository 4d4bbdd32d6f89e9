"""UnpicklableObjects: objects that an executor in the engine's process gets by reference."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from asyncllm.core.batch import SlotAssignment
from asyncllm.logits_processor import LogitsProcessor
from asyncllm.sampling_params import RequestLogitsProcessor, SamplingParams


@dataclass(slots=True, eq=False)
class UnpicklableObjects:
    """Unpicklable objects of requests and steps: callables, and exceptions with their causes.

    The executor makes one, as its attribute ``in_process``. The scheduler adds the requests' logits
    processors, and the executor adds the errors. An executor in another process has no such object:
    its errors arrive as text.

    Attributes:
        processors: logits processors of each live request, by ``SlotAssignment.processors_key``.
        logits_processors: the engine's logits processors, which the executor runs.
            ``SlotAssignment.claiming_processors`` says which of them apply to a request.
        errors: by number of a recent step, map from row to the exception whose text is in that
            step's ``StepResult.errors``.
    """

    processors: dict[int, Sequence[RequestLogitsProcessor]] = field(default_factory=dict)
    logits_processors: Sequence[LogitsProcessor] = ()
    errors: dict[int, dict[int, Exception]] = field(default_factory=dict)

    def restore_logits_processors(self, assignment: SlotAssignment) -> SlotAssignment:
        """Copy an assignment, with its request's own logits processors added."""
        processors = self.processors.get(assignment.processors_key, ())
        if not processors:
            return assignment
        return replace(
            assignment, sampling=_replace_logits_processors(assignment.sampling, processors)
        )


def picklable_params(sampling: SamplingParams) -> SamplingParams:
    """Make a picklable version of the parameters, without callables and grammar.

    It shares ``extra_args`` with ``sampling``: they may be large, and the engine thread would have
    to copy them for each output.
    """
    shared = sampling.logits_processors, sampling.logit_bias
    if not any(shared) and sampling.structured_outputs is None:
        return sampling
    params = _replace_logits_processors(sampling, ())
    object.__setattr__(params, "logit_bias", copy(sampling.logit_bias))
    object.__setattr__(params, "structured_outputs", None)
    return params


def _replace_logits_processors(
    sampling: SamplingParams, processors: Sequence[RequestLogitsProcessor]
) -> SamplingParams:
    # Copy the object directly: ``dataclasses.replace`` would validate every field again.
    params = copy(sampling)
    object.__setattr__(params, "logits_processors", processors)
    return params
