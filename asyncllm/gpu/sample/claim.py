"""Claim: a request that the engine's logits processors have a part in."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.core.batch import RequestAssignment


@dataclass(slots=True, eq=False)
class Claim:
    """A request that processors have claimed, while it has its request index.

    Attributes:
        processors: their numbers.
        assignment: what it entered with.
        output: tokens so far, which the processors see grow.
        error: of a processor that has lost track of it.
    """

    processors: tuple[int, ...]
    assignment: RequestAssignment
    output: list[int]
    error: Exception | None = None
