"""Codes: a quantised tensor as integers with scales, from which a loader makes plain weights, or
weights that stay packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A tensor ``[out, in]`` whose elements are ``(code - zero) * scale``, with the zero and the
    scale of their block of ``block`` rows and columns.

    Attributes:
        bits: of a code.
        rows: ``(start, stop)`` to the codes ``[stop - start, in]`` of these rows: uint8 from 0
            on, or int8.
        scales: ``[ceil(out / block[0]), ceil(in / block[1])]``.
        zeros: as ``scales``; None is 0.
        column_groups: ``[in]`` int64, the column of ``scales`` that each input has, where those are
            not in order; ``block[0]`` is 1 then.
        is_signed: codes are int8.
        step: rows that are stored together; ranges begin at multiples of it.
    """

    bits: int
    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None
    column_groups: Tensor | None = None
    is_signed: bool = False
    step: int = 1
