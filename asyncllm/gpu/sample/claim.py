"""Claim: a request that engine-wide logits processors process."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.core.batch import RequestAssignment


@dataclass(slots=True, eq=False)
class Claim:
    """A request that processors have claimed, while it has its request index.

    Attributes:
        processors: indices of the processors.
        assignment: the request's assignment.
        output: output tokens so far; the processors hold the same list and see it grow.
        error: error of a processor that failed and no longer knows the request's state.
    """

    processors: tuple[int, ...]
    assignment: RequestAssignment
    output: list[int]
    error: Exception | None = None
