"""dequantised: elements of Codes in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.checkpoint.codes import Codes


def dequantised(codes: Codes, start: int, stop: int) -> Tensor:
    """Dequantises rows ``start`` to ``stop - 1`` to float32."""
    part = codes.rows(start, stop).float()
    if codes.zeros is not None:
        part -= _expanded(codes, codes.zeros, start, stop)
    return part.mul_(_expanded(codes, codes.scales, start, stop))


def _expanded(codes: Codes, grid: Tensor, start: int, stop: int) -> Tensor:
    if codes.column_groups is not None:
        return grid[start:stop].float()[:, codes.column_groups]
    return expand_blocks(grid, codes.block, start, stop, codes.shape[1])


def expand_blocks(
    grid: Tensor, block: tuple[int, int], start: int, stop: int, columns: int
) -> Tensor:
    """Expands ``grid``, with one entry per block of rows and columns, to single elements.

    Args:
        grid: ``[ceil(rows / block[0]), ceil(columns / block[1])]``.

    Returns:
        float32 ``[stop - start, columns]``, or a shape that broadcasts to it.
    """
    part = grid.float()
    if part.shape[0] > 1:
        part = part[torch.arange(start, stop) // block[0]]
    if part.shape[1] > 1:
        part = part.repeat_interleave(block[1], dim=1)[:, :columns]
    return part
