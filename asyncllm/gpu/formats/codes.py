"""Codes: a quantised tensor as integers with scales, from which a loader makes plain weights, or
weights that stay packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
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

    def dequantised(self, start: int, stop: int) -> Tensor:
        """These rows in float32."""
        part = self.rows(start, stop).float()
        if self.zeros is not None:
            part -= self._over(self.zeros, start, stop)
        return part.mul_(self._over(self.scales, start, stop))

    def _over(self, grid: Tensor, start: int, stop: int) -> Tensor:
        if self.column_groups is not None:
            return grid[start:stop].float()[:, self.column_groups]
        return spread(grid, self.block, start, stop, self.shape[1])


def spread(grid: Tensor, block: tuple[int, int], start: int, stop: int, columns: int) -> Tensor:
    """The entries of ``grid``, one per block of rows and columns, over single elements.

    Args:
        grid: ``[ceil(rows / block[0]), ceil(columns / block[1])]``.

    Returns:
        float32 ``[stop - start, columns]``, or what broadcasts to it.
    """
    part = grid.float()
    if part.shape[0] > 1:
        part = part[torch.arange(start, stop) // block[0]]
    if part.shape[1] > 1:
        part = part.repeat_interleave(block[1], dim=1)[:, :columns]
    return part
