"""lay_out: places buffers in one allocation, whose memory buffers share over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Lifetime(NamedTuple):
    """A buffer's size, and the first and last op that use it, both inclusive."""

    num_bytes: int
    first: int
    last: int


def lay_out(buffers: Sequence[Lifetime], alignment: int) -> tuple[list[int], int]:
    """Returns the first byte of each buffer, and the bytes of the allocation.

    In the order of their first use, each buffer takes the lowest place that is free while it is in
    use.
    """
    starts, total = [0] * len(buffers), 0
    taken: list[tuple[int, int, int]] = []  # first and end byte, last op
    for index in sorted(range(len(buffers)), key=lambda each: buffers[each].first):
        num_bytes, first, last = buffers[index]
        need = -(-num_bytes // alignment) * alignment
        taken = sorted(place for place in taken if place[2] >= first)
        at = 0
        for first_byte, end_byte, _ in taken:
            if at + need <= first_byte:
                break
            at = max(at, end_byte)
        starts[index] = at
        taken.append((at, at + need, last))
        total = max(total, at + need)
    return starts, total
