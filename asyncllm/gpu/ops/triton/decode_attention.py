"""DecodeAttention: paged attention of one query token per row, with the keys split (split-KV).

The query heads of one key/value head are the rows of a tile, so that K and V are read once for all
of them. A program computes one split of a sequence's keys. Either every sequence has equally many
splits; or, in a batch of very different lengths, splits are balanced: all are equally long, so that
a long sequence has more (``merge_attention.py``).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import triton
import triton.language as tl

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention_plan import TritonPlan
from asyncllm.gpu.ops.triton.attention_tile import LOG2_E, attend_tile, padded_head_dim
from asyncllm.gpu.ops.triton.merge_attention import balanced_keys_per_split, keys_per_split
from asyncllm.gpu.ops.triton.paged_attention import MergeArguments, PagedAttention
from asyncllm.gpu.ops.triton.tuning import Tiles, cdiv, next_power_of_2


# The alignment of partial_sum in the workspace depends on the numbers of rows and splits. A kernel
# specialised on it would be compiled again while requests are served.
@triton.jit(
    do_not_specialize=["num_rows", "window"], do_not_specialize_on_alignment=["partial_sum"]
)
def decode_kernel(
    out,
    partial_acc,
    partial_max,
    partial_sum,
    q,
    kv_cache,
    block_table,
    table_rows,
    seq_lens,
    sinks,
    num_rows,
    score_scale,
    softcap,
    window,
    stride_out_row,
    stride_out_head,
    stride_q_row,
    stride_q_head,
    stride_kv,
    stride_block,
    stride_slot,
    stride_head,
    stride_dim,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    MAX_ROWS: tl.constexpr,
):
    """Computes attention of a tile of query heads over a split of the keys.

    With MAX_ROWS 0, all rows have equally many splits: grid
    ``(batch, kv_heads * ROW_TILES, splits)``, partial results ``[batch, heads, splits]``. Else
    splits are balanced, and MAX_ROWS is a power of two not below the batch: grid
    ``(all splits, kv_heads * ROW_TILES)``, partial results ``[all splits, heads]``. Accumulators
    have a last dimension of BLOCK_DIM.
    """
    ROW_TILES: tl.constexpr = tl.cdiv(GROUP, ROWS)
    BLOCK_DIM: tl.constexpr = padded_head_dim(HEAD_DIM)
    row = tl.program_id(0)
    kv_head = tl.program_id(1) // ROW_TILES
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    group_row = tl.program_id(1) % ROW_TILES * ROWS + tl.arange(0, ROWS)
    heads = kv_head * GROUP + group_row
    dims = tl.arange(0, BLOCK_DIM)
    per_split = 0
    if MAX_ROWS > 0:
        extra = tl.num_programs(0) - num_rows
        per_split, ends = balanced_keys_per_split(seq_lens, num_rows, extra, KEYS, MAX_ROWS)
        before = ends <= tl.program_id(0)
        row = tl.sum(before.to(tl.int32), 0)
        if row >= num_rows:
            return
        split = tl.program_id(0) - tl.max(tl.where(before, ends, 0), 0)
    in_group = group_row < GROUP
    real = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    out_at = out + row.to(tl.int64) * stride_out_row
    out_at += heads[:, None] * stride_out_head + dims[None, :]

    kv_len = tl.load(seq_lens + row).to(tl.int32)
    first = 0
    if MAX_ROWS == 0:
        first, per_split = keys_per_split(kv_len, splits, window, KEYS, WINDOW)
    start = first + split * per_split
    end = tl.minimum(start + per_split, kv_len)
    if start >= end:
        if ONE_SPLIT:
            tl.store(out_at, tl.zeros([ROWS, BLOCK_DIM], out.dtype.element_ty), mask=real)
        return

    q_at = q + row.to(tl.int64) * stride_q_row
    queries = tl.load(q_at + heads[:, None] * stride_q_head + dims[None, :], mask=real, other=0.0)
    table_row = tl.load(table_rows + row).to(tl.int64)
    table = block_table + table_row * stride_table
    at_head = kv_head.to(tl.int64) * stride_head
    k_cache = kv_cache + at_head
    cache = (k_cache, k_cache + stride_kv, table, stride_block, stride_slot, stride_dim)
    positions = tl.full([ROWS], 0, tl.int32) + (kv_len - 1)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        # The sink is a key without a value; only the first split counts it.
        if split == 0:
            row_max = tl.load(sinks + heads, mask=in_group, other=0.0) * LOG2_E
            row_sum += 1.0
    for first_key in range(start, end, KEYS):
        acc, row_max, row_sum = attend_tile(
            queries, acc, row_max, row_sum, cache, first_key, positions, kv_len - window, kv_len,
            (score_scale, softcap), window, HEAD_DIM, KEYS, BLOCK_SIZE, WINDOW, True,
        )  # fmt: skip
    if ONE_SPLIT:
        result = acc / row_sum[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=real)
    else:
        num_heads = tl.num_programs(1) // ROW_TILES * GROUP
        at = (row.to(tl.int64) * num_heads + heads) * splits + split
        if MAX_ROWS > 0:
            at = tl.program_id(0).to(tl.int64) * num_heads + heads
        tl.store(partial_max + at, row_max, mask=in_group)
        tl.store(partial_sum + at, row_sum, mask=in_group)
        acc_at = partial_acc + at[:, None] * BLOCK_DIM + dims[None, :]
        tl.store(acc_at, acc, mask=in_group[:, None])


class DecodeAttention(PagedAttention):
    """Attention of a plan's decode rows, one query token each, over the cache.

    Args:
        block_size: a multiple of 16.
    """

    def __init__(
        self, shape: AttentionShape, block_size: int, tiles: Tiles, plan: TritonPlan
    ) -> None:
        batch, extra, merge, max_rows = plan.num_decodes, plan.extra_splits, None, 0
        row_tiles, seq_lens = cdiv(shape.group_size, tiles.rows), plan.seq_lens[:batch]
        grid = (batch + extra, shape.num_kv_heads * row_tiles, plan.splits)
        if extra:
            # Derive MAX_ROWS from the block table: the batch varies, and a kernel is compiled for
            # each MAX_ROWS.
            max_rows = next_power_of_2(max(plan.block_table.shape[0], batch))
        if extra or plan.splits > 1:
            merge = MergeArguments(
                grid[0] * grid[2], batch, seq_lens, extra or plan.splits, window=plan.window,
                max_rows=max_rows,
            )  # fmt: skip
        super().__init__(
            decode_kernel, shape, block_size, tiles, plan, grid,
            (plan.block_table, plan.table_rows[:batch], seq_lens), (batch,), merge,
            MAX_ROWS=max_rows,
        )  # fmt: skip
