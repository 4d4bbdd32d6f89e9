"""Partial results of attention whose keys are divided among programs, and their merge.

Each program writes an accumulator, the maximum of its scores and the sum of their exponentials, in
float32 (Flash-Decoding, Dao et al., 2023). Keys are divided in three ways: all decode rows into
equally many splits; decode rows into shares of equal length, many for a long row and one for a
short one; and the tiles of a prefill into equally many splits.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker sees a kernel as the Python function that it is written as.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.launcher import launched
from asyncllm.gpu.ops.triton.tuning import SPLIT_TOKENS, block_dim_of

MIN_SHARE_TOKENS = tl.constexpr(SPLIT_TOKENS)
MERGED_SPLITS = 8


@triton.jit
def split_keys(kv_len, splits, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """First key of a sequence's first visible tile, and keys per split, in whole tiles."""
    first = 0
    if WINDOW:
        first = tl.maximum(kv_len - window, 0) // KEYS * KEYS
    per_split = tl.cdiv(tl.cdiv(kv_len - first, KEYS), splits) * KEYS
    return first, per_split


@triton.jit
def share_keys(seq_lens, num_rows, extra, KEYS: tl.constexpr, LINES: tl.constexpr):
    """Keys per share, and in ``[LINES]`` the number of shares up to the end of each row.

    A row has at most one share that is not full, so that there are at most ``num_rows + extra``.
    """
    rows = tl.arange(0, LINES)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0).to(tl.int32)
    total = tl.sum(lengths.to(tl.int64), 0)
    per_share = tl.maximum(tl.cdiv(tl.cdiv(total, extra), KEYS) * KEYS, MIN_SHARE_TOKENS).to(
        tl.int32
    )
    return per_share, tl.cumsum(tl.cdiv(lengths, per_share), 0)


# The addresses of partial_sum and seq_lens depend on the number of rows and splits. A kernel
# specialised on their alignment would be compiled again in the middle of serving.
@launched
@triton.jit(
    do_not_specialize=["splits", "first_row", "window"],
    do_not_specialize_on_alignment=["partial_sum", "seq_lens"],
)
def merge_kernel(
    out,
    partial_acc,
    partial_max,
    partial_sum,
    seq_lens,
    splits,
    first_row,
    window,
    stride_out_row,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MERGED: tl.constexpr,
    WINDOW: tl.constexpr,
    LINES: tl.constexpr,
    PREFILL: tl.constexpr,
):
    """Merges the partial results of a row and head; grid ``(rows, heads)``.

    Splits of a decode row without keys have written nothing, and are skipped.

    Args:
        seq_lens: lengths of decode rows; with PREFILL the number of query tokens, padding excluded.
        splits: splits of a row; with LINES > 0 the shares beyond one per row.
        first_row: first row of ``out``.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    base = (row.to(tl.int64) * tl.num_programs(1) + head) * splits
    step = 1
    if PREFILL:
        used = splits
        if row >= tl.load(seq_lens):
            return
    elif LINES > 0:
        per_share, ends = share_keys(seq_lens, tl.num_programs(0), splits, KEYS, LINES)
        used = tl.cdiv(tl.load(seq_lens + row).to(tl.int32), per_share)
        end = tl.sum(tl.where(tl.arange(0, LINES) == row, ends, 0), 0)
        step = tl.num_programs(1)
        base = (end - used).to(tl.int64) * step + head
    else:
        kv_len = tl.load(seq_lens + row).to(tl.int32)
        first, per_split = split_keys(kv_len, splits, window, KEYS, WINDOW)
        used = tl.cdiv(kv_len - first, tl.maximum(per_split, 1))
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    total_max = tl.full([], float("-inf"), tl.float32)
    total_sum = tl.zeros([], tl.float32)
    for start in range(0, used, MERGED):
        split = start + tl.arange(0, MERGED)
        exists = split < used
        at = base + split * step
        maxima = tl.load(partial_max + at, mask=exists, other=float("-inf"))
        sums = tl.load(partial_sum + at, mask=exists, other=0.0)
        accs = tl.load(
            partial_acc + at[:, None] * BLOCK_DIM + dims[None, :], mask=exists[:, None], other=0.0
        )
        new_max = tl.maximum(total_max, tl.max(maxima, 0))
        # The first splits of a prefill's row may have no key of the row's window.
        known = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(maxima - known)
        decay = tl.exp2(total_max - known)
        total_sum = total_sum * decay + tl.sum(sums * weights, 0)
        acc = acc * decay + tl.sum(accs * weights[:, None], 0)
        total_max = new_max
    result = acc / tl.where(used > 0, total_sum, 1.0)
    out_at = out + (row.to(tl.int64) + first_row) * stride_out_row + head * stride_out_head + dims
    tl.store(out_at, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


class Partials:
    """The workspace of partial results, and their merge.

    Args:
        workspace: float32, at least ``workspace_size`` elements.
        count: partial results per query head.
        seq_lens, splits, lines, prefill: see ``merge_kernel``.

    Attributes:
        tensors: accumulators ``[count * heads * BLOCK_DIM]``, maxima and sums ``[count * heads]``.
    """

    def __init__(
        self,
        workspace: Tensor,
        count: int,
        shape: AttentionShape,
        seq_lens: Tensor,
        splits: int,
        *,
        keys: int,
        window: int | None = None,
        lines: int = 0,
        prefill: bool = False,
    ) -> None:
        size, block_dim = count * shape.num_heads, block_dim_of(shape.head_dim)
        self.tensors = workspace[: size * (block_dim + 2)].split([size * block_dim, size, size])
        self._seq_lens, self._num_heads = seq_lens, shape.num_heads
        self._splits, self._window = splits, window or 0
        self._kernel = merge_kernel.bind(
            HEAD_DIM=shape.head_dim,
            BLOCK_DIM=block_dim,
            KEYS=keys,
            MERGED=MERGED_SPLITS,
            WINDOW=window is not None,
            LINES=lines,
            PREFILL=prefill,
            num_warps=4,
        )

    def merge(self, out: Tensor, rows: int, strides: tuple[int, ...], first_row: int = 0) -> None:
        """Writes the merged results of ``rows`` rows to ``out [T, Hq, D]``.

        Args:
            strides: strides of rows and heads of ``out``.
        """
        grid = (rows, self._num_heads, 1)
        numbers = self._splits, first_row, self._window
        self._kernel(grid, out, *self.tensors, self._seq_lens, *numbers, *strides)
