"""merge_kernel: merges the partial results of attention with split keys (split-KV).

For each split a program writes an accumulator, the maximum of the split's scores and the sum of
their exponentials, in float32 (Flash-Decoding, Dao et al., 2023). Keys are split in one of three
ways:

- every decode row into equally many splits;
- decode rows into balanced splits, which are equally long: a long row has many, a short row one;
- every tile of a prefill into equally many splits.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import triton
import triton.language as tl

from asyncllm.gpu.ops.triton import tuning
from asyncllm.gpu.ops.triton.attention_tile import padded_head_dim

MIN_SPLIT_TOKENS = tl.constexpr(tuning.MIN_SPLIT_TOKENS)

SPLITS_PER_ITERATION = tl.constexpr(8)
"""Number of splits whose partial results a program reads at a time."""


@triton.jit
def keys_per_split(kv_len, splits, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """First key of a sequence's first visible tile, and keys per split (a multiple of KEYS)."""
    first = 0
    if WINDOW:
        first = tl.maximum(kv_len - window, 0) // KEYS * KEYS
    per_split = tl.cdiv(tl.cdiv(kv_len - first, KEYS), splits) * KEYS
    return first, per_split


@triton.jit
def balanced_keys_per_split(
    seq_lens, num_rows, num_extra_splits, KEYS: tl.constexpr, MAX_ROWS: tl.constexpr
):
    """Keys per balanced split, and the cumulative number of splits by row, ``[MAX_ROWS]``.

    All splits of a row but the last are full, so that the number of splits is at most ``num_rows +
    num_extra_splits``.
    """
    rows = tl.arange(0, MAX_ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0).to(tl.int32)
    total = tl.sum(lengths.to(tl.int64), 0)
    per_split = tl.maximum(
        tl.cdiv(tl.cdiv(total, num_extra_splits), KEYS) * KEYS, MIN_SPLIT_TOKENS
    ).to(tl.int32)
    return per_split, tl.cumsum(tl.cdiv(lengths, per_split), 0)


# The alignments of partial_sum and seq_lens depend on the numbers of rows and splits. A kernel
# specialised on them would be compiled again while requests are served.
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
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    PREFILL: tl.constexpr,
):
    """Merges the partial results of a row and head; grid ``(rows, heads)``.

    A decode row's splits without keys are skipped, because nothing was written for them.

    Args:
        seq_lens: lengths of decode rows; if PREFILL, a single entry, the number of query tokens
            without padding.
        splits: number of splits per row; if MAX_ROWS > 0, the ``num_extra_splits`` of
            ``balanced_keys_per_split``.
        first_row: index of the first row in ``out``.
    """
    BLOCK_DIM: tl.constexpr = padded_head_dim(HEAD_DIM)
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    base = (row.to(tl.int64) * tl.num_programs(1) + head) * splits
    step = 1
    if PREFILL:
        used = splits
        if row >= tl.load(seq_lens):
            return
    elif MAX_ROWS > 0:
        per_split, ends = balanced_keys_per_split(
            seq_lens, tl.num_programs(0), splits, KEYS, MAX_ROWS
        )
        used = tl.cdiv(tl.load(seq_lens + row).to(tl.int32), per_split)
        end = tl.sum(tl.where(tl.arange(0, MAX_ROWS) == row, ends, 0), 0)
        step = tl.num_programs(1)
        base = (end - used).to(tl.int64) * step + head
    else:
        kv_len = tl.load(seq_lens + row).to(tl.int32)
        first, per_split = keys_per_split(kv_len, splits, window, KEYS, WINDOW)
        used = tl.cdiv(kv_len - first, tl.maximum(per_split, 1))
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    total_max = tl.full([], float("-inf"), tl.float32)
    total_sum = tl.zeros([], tl.float32)
    for start in range(0, used, SPLITS_PER_ITERATION):
        split = start + tl.arange(0, SPLITS_PER_ITERATION)
        exists = split < used
        at = base + split * step
        maxima = tl.load(partial_max + at, mask=exists, other=float("-inf"))
        sums = tl.load(partial_sum + at, mask=exists, other=0.0)
        accs = tl.load(
            partial_acc + at[:, None] * BLOCK_DIM + dims[None, :], mask=exists[:, None], other=0.0
        )
        new_max = tl.maximum(total_max, tl.max(maxima, 0))
        # Subtract 0 while no split has had a key in the row's window: minus infinity less itself is
        # NaN.
        base_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(maxima - base_max)
        decay = tl.exp2(total_max - base_max)
        total_sum = total_sum * decay + tl.sum(sums * weights, 0)
        acc = acc * decay + tl.sum(accs * weights[:, None], 0)
        total_max = new_max
    result = acc / tl.where(used > 0, total_sum, 1.0)
    out_at = out + (row.to(tl.int64) + first_row) * stride_out_row + head * stride_out_head + dims
    tl.store(out_at, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
