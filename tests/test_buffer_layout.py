"""Buffers of a recorded step that share its memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.gpu.ops.buffer_layout import Lifetime, lay_out_buffers
from tests.hypothesis_settings import examples

LIFETIMES = st.builds(
    lambda num_bytes, first, length: Lifetime(num_bytes, first, first + length),
    st.integers(1, 300), st.integers(0, 12), st.integers(0, 5),
)  # fmt: skip


@given(st.lists(LIFETIMES, max_size=14), st.sampled_from([1, 64]))
@examples(100)
def test_buffers_in_use_at_once_do_not_overlap(buffers: list[Lifetime], alignment: int) -> None:
    starts, total = lay_out_buffers(buffers, alignment)
    assert all(start % alignment == 0 for start in starts)
    ends = [start + each.num_bytes for start, each in zip(starts, buffers, strict=True)]
    assert max(ends, default=0) <= total
    for i, one in enumerate(buffers):
        for j, other in enumerate(buffers[:i]):
            if one.first_op <= other.last_op and other.first_op <= one.last_op:
                assert starts[i] >= ends[j] or starts[j] >= ends[i]
    # No room is kept for what is over: never more than all that is in use at some op.
    assert total <= sum(-(-each.num_bytes // alignment) * alignment for each in buffers)
