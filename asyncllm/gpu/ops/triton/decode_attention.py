"""Paged attention of decode rows: one query token each, keys split among programs.

The query heads of one key/value head are the rows of a tile, so that K and V are read once
for all of them; the keys of a long sequence are split among programs (Flash-Decoding, Dao et
al., 2023), whose float32 partials a second kernel merges.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker takes a kernel for the function that it is written as.

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.attention_tile import LOG2_E, attend_tile, score_factors
from asyncllm.gpu.ops.triton.tuning import Tiles, cdiv, next_power_of_2, workspace_size

MERGED_SPLITS = 8


@triton.jit
def split_keys(kv_len, splits, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """First visible tile of a sequence and the keys of each split, in whole tiles."""
    first = 0
    if WINDOW:
        first = tl.maximum(kv_len - window, 0) // KEYS * KEYS
    per_split = tl.cdiv(tl.cdiv(kv_len - first, KEYS), splits) * KEYS
    return first, per_split


# Where the sums begin in the workspace depends on the number of rows and splits: specialised on
# it, the kernels would be compiled again in the middle of serving.
@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["partial_sum"])
def decode_kernel(
    out,
    partial_acc,
    partial_max,
    partial_sum,
    q,
    k_cache,
    v_cache,
    block_table,
    table_rows,
    seq_lens,
    sinks,
    score_scale,
    softcap,
    window,
    stride_out_row,
    stride_out_head,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_dim,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
):
    """Grid ``(batch, kv_heads * ROW_TILES, splits)``.

    Partials are ``[batch, heads, splits]``, the accumulators with BLOCK_DIM more.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1) // ROW_TILES
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    group_row = tl.program_id(1) % ROW_TILES * ROWS + tl.arange(0, ROWS)
    heads = kv_head * GROUP + group_row
    dims = tl.arange(0, BLOCK_DIM)
    in_group = group_row < GROUP
    real = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    out_at = out + row.to(tl.int64) * stride_out_row
    out_at += heads[:, None] * stride_out_head + dims[None, :]

    kv_len = tl.load(seq_lens + row).to(tl.int32)
    first, per_split = split_keys(kv_len, splits, window, KEYS, WINDOW)
    start = first + split * per_split
    end = tl.minimum(start + per_split, kv_len)
    if start >= end:
        if ONE_SPLIT:
            tl.store(out_at, tl.zeros([ROWS, BLOCK_DIM], out.dtype.element_ty), mask=real)
        return

    q_at = q + row.to(tl.int64) * stride_q_row
    queries = tl.load(q_at + heads[:, None] * stride_q_head + dims[None, :], mask=real, other=0.0)
    line = tl.load(table_rows + row).to(tl.int64)
    table = block_table + line * stride_table
    at_head = kv_head.to(tl.int64) * stride_head
    cache = (k_cache + at_head, v_cache + at_head, table, stride_block, stride_slot, stride_dim)
    factors = (score_scale, softcap, window)
    positions = tl.full([ROWS], 0, tl.int32) + (kv_len - 1)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if SINKS:
        # A key without a value, among those of the first split.
        if split == 0:
            row_max = tl.load(sinks + heads, mask=in_group, other=0.0) * LOG2_E
            row_sum += 1.0
    for first_key in range(start, end, KEYS):
        acc, row_max, row_sum = attend_tile(
            queries, acc, row_max, row_sum, *cache, first_key, positions, kv_len - window, kv_len,
            *factors, HEAD_DIM, BLOCK_DIM, KEYS, BLOCK_SIZE, SOFTCAP, WINDOW, True,
        )  # fmt: skip
    if ONE_SPLIT:
        result = acc / row_sum[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=real)
    else:
        num_heads = tl.num_programs(1) // ROW_TILES * GROUP
        at = (row.to(tl.int64) * num_heads + heads) * splits + split
        tl.store(partial_max + at, row_max, mask=in_group)
        tl.store(partial_sum + at, row_sum, mask=in_group)
        acc_at = partial_acc + at[:, None] * BLOCK_DIM + dims[None, :]
        tl.store(acc_at, acc, mask=in_group[:, None])


@triton.jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=["partial_sum"])
def merge_kernel(
    out,
    partial_acc,
    partial_max,
    partial_sum,
    seq_lens,
    splits,
    window,
    stride_out_row,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MERGED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid ``(batch, heads)``. Splits that had no keys have written nothing."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    kv_len = tl.load(seq_lens + row).to(tl.int32)
    first, per_split = split_keys(kv_len, splits, window, KEYS, WINDOW)
    used = tl.cdiv(kv_len - first, tl.maximum(per_split, 1))
    base = (row.to(tl.int64) * tl.num_programs(1) + head) * splits
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    total_max = tl.full([], float("-inf"), tl.float32)
    total_sum = tl.zeros([], tl.float32)
    for start in range(0, used, MERGED):
        split = start + tl.arange(0, MERGED)
        exists = split < used
        maxima = tl.load(partial_max + base + split, mask=exists, other=float("-inf"))
        sums = tl.load(partial_sum + base + split, mask=exists, other=0.0)
        accs = tl.load(
            partial_acc + (base + split)[:, None] * BLOCK_DIM + dims[None, :],
            mask=exists[:, None],
            other=0.0,
        )
        new_max = tl.maximum(total_max, tl.max(maxima, 0))
        weights = tl.exp2(maxima - new_max)
        decay = tl.exp2(total_max - new_max)
        total_sum = total_sum * decay + tl.sum(sums * weights, 0)
        acc = acc * decay + tl.sum(accs * weights[:, None], 0)
        total_max = new_max
    result = acc / tl.where(used > 0, total_sum, 1.0)
    out_at = out + row.to(tl.int64) * stride_out_row + head * stride_out_head + dims
    tl.store(out_at, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    table_rows: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    tiles: Tiles,
    splits: int = 1,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query token per row over its cached keys and values.

    Args:
        q: ``[B, Hq, D]``, the last dimension contiguous; D up to 256.
        cache: ``[2, num_blocks, block_size, Hk, D]``, any strides; ``block_size`` a multiple
            of 16. The row's own key is in it already.
        block_table: ``[N, W]`` int32; entries past a sequence are never read.
        table_rows: ``[B]``, each row's line of ``block_table``.
        seq_lens: ``[B]`` int32 or int64, the row's own token included; 0 for a padded row,
            whose output is zero.
        scale: factor on ``q @ k``.
        splits: programs per row and key/value head, from ``num_splits``.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        window: keys that a query sees, its own included; None is all.
        sinks: ``[Hq]`` float32, a logit per head that takes part in the softmax.
        workspace: at least ``workspace_size`` float32 elements, made here if None.
        out: ``[B, Hq, D]``, the last dimension contiguous; made here if None.

    Returns:
        ``[B, Hq, D]`` in the dtype of ``q``.
    """
    batch, num_heads, head_dim = q.shape
    block_size, kv_heads = cache.shape[2:4]
    group = num_heads // kv_heads
    row_tiles = cdiv(group, tiles.rows)
    block_dim = max(16, next_power_of_2(head_dim))
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not batch:
        return out
    partials = _partials(q, out, splits, block_dim, workspace)
    score_scale, cap = score_factors(scale, softcap)
    decode_kernel[(batch, kv_heads * row_tiles, splits)](
        out,
        *partials,
        q,
        cache[0],
        cache[1],
        block_table,
        table_rows,
        seq_lens,
        sinks,
        score_scale,
        cap,
        window or 0,
        *out.stride()[:2],
        *q.stride()[:2],
        *cache.stride()[1:],
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        ROWS=tiles.rows,
        ROW_TILES=row_tiles,
        KEYS=tiles.keys,
        BLOCK_SIZE=block_size,
        SOFTCAP=softcap is not None,
        WINDOW=window is not None,
        SINKS=sinks is not None,
        ONE_SPLIT=splits == 1,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        merge_kernel[(batch, num_heads)](
            out,
            *partials,
            seq_lens,
            splits,
            window or 0,
            *out.stride()[:2],
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim,
            KEYS=tiles.keys,
            MERGED=MERGED_SPLITS,
            WINDOW=window is not None,
            num_warps=4,
        )
    return out


def _partials(
    q: Tensor, out: Tensor, splits: int, block_dim: int, workspace: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulators, maxima and sums in one workspace; with one split nothing uses them."""
    if splits == 1:
        return out, out, out
    batch, num_heads, head_dim = q.shape
    count = batch * num_heads * splits
    if workspace is None:
        size = workspace_size(batch, num_heads, head_dim, splits)
        workspace = torch.empty(size, dtype=torch.float32, device=q.device)
    acc = workspace[: count * block_dim]
    maxima = workspace[count * block_dim : count * (block_dim + 1)]
    return acc, maxima, workspace[count * (block_dim + 1) : count * (block_dim + 2)]
