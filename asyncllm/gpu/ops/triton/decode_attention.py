"""Paged attention of decode rows: one query token each, keys divided among programs.

The query heads of one key/value head are the rows of a tile, so that K and V are read once
for all of them. Every sequence is divided among equally many programs ("splits"); or, in a batch of
very different lengths, into "shares" of equal length (``merge_attention.py``).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker sees a kernel as the Python function that it is written as.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.attention_tile import LOG2_E, attend_tile, score_factors
from asyncllm.gpu.ops.triton.launcher import launched
from asyncllm.gpu.ops.triton.merge_attention import Partials, share_keys, split_keys
from asyncllm.gpu.ops.triton.operands import (
    cache_strides,
    check_attention,
    check_rows,
    check_tensors,
    head_strides,
)
from asyncllm.gpu.ops.triton.tuning import Tiles, block_dim_of, cdiv, next_power_of_2


# The address of partial_sum in the workspace depends on the number of rows and splits. A kernel
# specialised on its alignment would be compiled again in the middle of serving.
@launched
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
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    LINES: tl.constexpr,
):
    """Attention of a tile of query heads over a split or a share of the keys.

    Grid ``(batch, kv_heads * ROW_TILES, splits)``, partial results ``[batch, heads, splits]``.
    LINES > 0, a bound of the batch, selects shares: grid ``(shares, kv_heads * ROW_TILES)``,
    partial results ``[shares, heads]``. Accumulators have a last dimension of BLOCK_DIM.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1) // ROW_TILES
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    group_row = tl.program_id(1) % ROW_TILES * ROWS + tl.arange(0, ROWS)
    heads = kv_head * GROUP + group_row
    dims = tl.arange(0, BLOCK_DIM)
    per_split = 0
    if LINES > 0:
        extra = tl.num_programs(0) - num_rows
        per_split, ends = share_keys(seq_lens, num_rows, extra, KEYS, LINES)
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
    if LINES == 0:
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
    k_cache = kv_cache + at_head
    cache = (k_cache, k_cache + stride_kv, table, stride_block, stride_slot, stride_dim)
    factors = (score_scale, softcap, window)
    positions = tl.full([ROWS], 0, tl.int32) + (kv_len - 1)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if SINKS:
        # The sink is a key without a value, counted in the first split.
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
        if LINES > 0:
            at = tl.program_id(0).to(tl.int64) * num_heads + heads
        tl.store(partial_max + at, row_max, mask=in_group)
        tl.store(partial_sum + at, row_sum, mask=in_group)
        acc_at = partial_acc + at[:, None] * BLOCK_DIM + dims[None, :]
        tl.store(acc_at, acc, mask=in_group[:, None])


class DecodeAttention:
    """The launches of decode attention that all layers of a step share.

    Args:
        shape: ``(query heads, key/value heads, head size)``.
        block_table, table_rows, seq_lens, options: as for ``decode_attention``.
        has_sinks: each call has the layer's sinks.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        block_size: int,
        block_table: Tensor,
        table_rows: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        tiles: Tiles,
        splits: int = 1,
        extra_shares: int = 0,
        softcap: float | None = None,
        window: int | None = None,
        has_sinks: bool = False,
        workspace: Tensor | None = None,
    ) -> None:
        if extra_shares and window is not None:
            raise ValueError(f"extra_shares={extra_shares}: expected 0 with a window")
        num_heads, kv_heads, head_dim = shape
        check_attention(num_heads, kv_heads, splits, window, block_table)
        check_rows(len(seq_lens), table_rows=table_rows, seq_lens=seq_lens)
        batch, group = seq_lens.shape[0], num_heads // kv_heads
        row_tiles, lines = cdiv(group, tiles.rows), 0
        self._grid = (batch, kv_heads * row_tiles, splits)
        if extra_shares:
            self._grid = (batch + extra_shares, kv_heads * row_tiles, 1)
            # The batch alone would need a kernel for each of its powers of two.
            lines = next_power_of_2(max(block_table.shape[0], batch))
        self._partials: Partials | None = None
        if splits > 1 or extra_shares:
            count = self._grid[0] * self._grid[2]
            self._partials = Partials(
                workspace, count, num_heads, head_dim, seq_lens, extra_shares or splits,
                keys=tiles.keys, window=window, lines=lines,
            )  # fmt: skip
        self._rows = block_table, table_rows, seq_lens
        self._numbers = (batch, *score_factors(scale, softcap), window or 0)
        self._stride_table = block_table.stride(0)
        self._kernel = decode_kernel.bind(
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim_of(head_dim),
            ROWS=tiles.rows,
            ROW_TILES=row_tiles,
            KEYS=tiles.keys,
            BLOCK_SIZE=block_size,
            SOFTCAP=softcap is not None,
            WINDOW=window is not None,
            SINKS=has_sinks,
            ONE_SPLIT=self._partials is None,
            LINES=lines,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def __call__(self, q: Tensor, cache: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Attention of the first rows of ``q [T, Hq, D]``, written to those of ``out``."""
        partials = self._partials
        out_strides = head_strides("out", out)
        self._kernel(
            self._grid,
            out,
            *((out, out, out) if partials is None else partials.tensors),
            q,
            cache,
            *self._rows,
            out if sinks is None else sinks,
            *self._numbers,
            *out_strides,
            *head_strides("q", q),
            *cache_strides(cache),
            self._stride_table,
        )
        if partials is not None:
            partials.merge(out, self._numbers[0], out_strides)


def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    table_rows: Tensor,
    seq_lens: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention of one query token per row over its cached keys and values.

    Args:
        q: ``[B, Hq, D]``, the last dimension contiguous; D up to 512.
        cache: ``[2, num_blocks, block_size, Hk, D]`` with any strides, but a head spans less than
            2**31 elements; ``block_size`` a multiple of 16. It already has the row's own key.
        block_table: ``[N, W]`` int32; entries beyond a sequence are never read.
        table_rows: ``[B]``, each row's row of ``block_table``; contiguous, like all metadata.
        seq_lens: ``[B]`` int32 or int64, the row's own token included; 0 for a padded row,
            whose output is zero.
        sinks: ``[Hq]`` float32, a logit per head that takes part in the softmax.
        out: ``[B, Hq, D]``, the last dimension contiguous; made here if None.
        options: ``scale``, a factor on ``q @ k``; ``tiles``;
            ``splits``, programs per row and key/value head, from ``num_splits``;
            ``extra_shares``, used instead of splits unless 0 and without a window: programs per
            key/value head beyond one per row. Keys are divided into shares of equal length, and a
            row has as many shares as it needs;
            ``softcap``, scores become ``softcap * tanh(score / softcap)``;
            ``window``, keys that a query sees, its own included, None for all;
            ``workspace``, at least ``workspace_size`` float32 elements, made here if None.

    Returns:
        ``[B, Hq, D]`` in the dtype of ``q``.

    Raises:
        ValueError: shares with a window, or operands that do not fit one another.
    """
    block_size, kv_heads = cache.shape[2:4]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    check_tensors(q, cache, out)
    if q.shape[0]:
        shape = q.shape[1], kv_heads, q.shape[2]
        has_sinks = sinks is not None
        attention = DecodeAttention(
            shape, block_size, block_table, table_rows, seq_lens, has_sinks=has_sinks, **options
        )
        attention(q, cache, out, sinks)
    return out
