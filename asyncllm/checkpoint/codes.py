"""Codes: a quantised tensor as integers and scales. A loader dequantises it, or repacks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Quantised tensor ``[out, in]`` with elements ``(code - zero) * scale``. Blocks of ``block``
    (rows, columns) share a zero and a scale.

    Attributes:
        bits: bits of a code.
        rows: function ``(start, stop)`` that returns the codes ``[stop - start, in]`` of these
            rows, as uint8 or int8.
        scales: ``[ceil(out / block[0]), ceil(in / block[1])]``.
        zeros: same shape as ``scales``; None is 0.
        column_groups: ``[in]`` int64, the column of ``scales`` for each input, if inputs are not
            grouped in order; ``block[0]`` is 1 then.
        is_signed: whether codes are int8.
        step: number of rows that are stored together; ranges begin at multiples of it.
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
