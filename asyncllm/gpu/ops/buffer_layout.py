"""lay_out_buffers: places buffers in one allocation; those never in use together may overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Lifetime(NamedTuple):
    """Size of a buffer, and the indices of the first and the last op that use it."""

    num_bytes: int
    first_op: int
    last_op: int


def lay_out_buffers(buffers: Sequence[Lifetime], alignment: int) -> tuple[list[int], int]:
    """Returns the offset of each buffer, and the size of the allocation, in bytes.

    Buffers are placed in the order of their first use. Each gets the lowest offset at which it
    overlaps no buffer that is in use at the same time.
    """
    starts, total = [0] * len(buffers), 0
    # Each entry is a placed buffer: first byte, end byte, index of its last op.
    placed: list[tuple[int, int, int]] = []
    for index in sorted(range(len(buffers)), key=lambda each: buffers[each].first_op):
        num_bytes, first_op, last_op = buffers[index]
        size = -(-num_bytes // alignment) * alignment
        placed = sorted(place for place in placed if place[2] >= first_op)
        offset = 0
        for first_byte, end_byte, _ in placed:
            if offset + size <= first_byte:
                break
            offset = max(offset, end_byte)
        starts[index] = offset
        placed.append((offset, offset + size, last_op))
        total = max(total, offset + size)
    return starts, total
