"""Paged attention of sequences with several query tokens behind a cached prefix.

The rows of a tile are query tokens times the query heads of one key/value head, the heads
padded to a power of two. The grid is an upper bound that the host knows without the lengths: each
program finds its sequence by binary search, and returns if there is none. The last tiles, which
have the most keys, are launched first, so that fewer multiprocessors are idle at the end. If there
are few tiles, the keys of each are divided among programs (``merge_attention.py``).
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
from asyncllm.gpu.ops.triton.merge_attention import Partials
from asyncllm.gpu.ops.triton.operands import (
    cache_strides,
    check_attention,
    check_rows,
    check_tensors,
    head_strides,
)
from asyncllm.gpu.ops.triton.tuning import Tiles, block_dim_of, next_power_of_2, num_tiles


@triton.jit
def find_sequence(query_start_loc, num_seqs, tile, TOKENS: tl.constexpr):
    """The sequence of a tile: the last one whose first tile is not after ``tile``.

    Sequence s has the tiles from ``query_start_loc[s] // TOKENS + s`` on, at least as many as it
    needs.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start_loc + middle).to(tl.int32) // TOKENS + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


# The rows come after the step's decode rows, so that their addresses depend on the number of those.
# A kernel specialised on their alignment would be compiled again in the middle of serving.
@launched
@triton.jit(
    do_not_specialize=["num_seqs", "first_row", "window"],
    do_not_specialize_on_alignment=["partial_sum", "table_rows", "seq_lens", "query_start_loc"],
)
def prefill_kernel(
    out,
    partial_acc,
    partial_max,
    partial_sum,
    q,
    kv_cache,
    block_table,
    table_rows,
    seq_lens,
    query_start_loc,
    sinks,
    num_seqs,
    first_row,
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
    GROUP_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
):
    """Attention of a tile of queries over a split of their keys.

    Grid ``(tiles, kv_heads, splits)``. A tile is ``ROWS / GROUP_ROWS`` tokens of one sequence.
    Tokens are counted from row ``first_row`` of q and out. Partial results are ``[tokens, heads,
    splits]``; accumulators have a last dimension of BLOCK_DIM.

    A token has GROUP_ROWS rows, the next power of two from GROUP: divisions by any other
    number would take registers that a full tile does not have.
    """
    TOKENS: tl.constexpr = ROWS // GROUP_ROWS
    # The last tiles come first, because later queries see more keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    kv_head = tl.program_id(1)
    seq = find_sequence(query_start_loc, num_seqs, tile, TOKENS)
    first_query = tl.load(query_start_loc + seq).to(tl.int32)
    num_queries = tl.load(query_start_loc + seq + 1).to(tl.int32) - first_query
    offset = (tile - first_query // TOKENS - seq) * TOKENS
    if offset >= num_queries:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    tokens = offset + rows // GROUP_ROWS
    heads = kv_head * GROUP + rows % GROUP_ROWS
    in_tile = (rows % GROUP_ROWS < GROUP) & (tokens < num_queries)
    real = in_tile[:, None] & (dims < HEAD_DIM)[None, :]
    at = (first_query + tokens).to(tl.int64)
    q += first_row.to(tl.int64) * stride_q_row
    queries = tl.load(
        q + at[:, None] * stride_q_row + heads[:, None] * stride_q_head + dims[None, :],
        mask=real,
        other=0.0,
    )
    kv_len = tl.load(seq_lens + seq).to(tl.int32)
    prefix = kv_len - num_queries
    positions = prefix + tl.minimum(tokens, num_queries - 1)
    end = tl.minimum(prefix + offset + TOKENS, kv_len)
    first_seen = prefix + offset - window + 1
    # With accumulators of more than 256 elements to a row, two loops over keys spill registers.
    ONE_LOOP: tl.constexpr = WINDOW or BLOCK_DIM > 256
    start = 0
    if WINDOW:
        start = tl.maximum(first_seen, 0) // KEYS * KEYS
    unmasked_end = start
    if not ONE_LOOP:
        unmasked_end = (prefix + offset + 1) // KEYS * KEYS
    if not ONE_SPLIT:
        per_split = tl.cdiv(tl.cdiv(end - start, KEYS), splits) * KEYS
        start += split * per_split
        end = tl.minimum(start + per_split, end)
        unmasked_end = tl.minimum(tl.maximum(unmasked_end, start), end)

    line = tl.load(table_rows + seq).to(tl.int64)
    table = block_table + line * stride_table
    at_head = kv_head.to(tl.int64) * stride_head
    k_cache = kv_cache + at_head
    cache = (k_cache, k_cache + stride_kv, table, stride_block, stride_slot, stride_dim)
    factors = (score_scale, softcap, window)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if SINKS:
        # The sink is a key without a value, counted in the first split.
        if split == 0:
            row_max = tl.load(sinks + heads, mask=in_tile, other=0.0) * LOG2_E
            row_sum += 1.0
    if not ONE_LOOP:
        for first_key in range(start, unmasked_end, KEYS):
            acc, row_max, row_sum = attend_tile(
                queries, acc, row_max, row_sum, *cache, first_key, positions, first_seen, kv_len,
                *factors, HEAD_DIM, BLOCK_DIM, KEYS, BLOCK_SIZE, SOFTCAP, WINDOW, False,
            )  # fmt: skip
    for first_key in range(unmasked_end, end, KEYS):
        acc, row_max, row_sum = attend_tile(
            queries, acc, row_max, row_sum, *cache, first_key, positions, first_seen, kv_len,
            *factors, HEAD_DIM, BLOCK_DIM, KEYS, BLOCK_SIZE, SOFTCAP, WINDOW, True,
        )  # fmt: skip
    if ONE_SPLIT:
        result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
        out += first_row.to(tl.int64) * stride_out_row
        out_at = out + at[:, None] * stride_out_row + heads[:, None] * stride_out_head
        tl.store(out_at + dims[None, :], result, mask=real)
    else:
        partial = (at * (tl.num_programs(1) * GROUP) + heads) * splits + split
        tl.store(partial_max + partial, row_max, mask=in_tile)
        tl.store(partial_sum + partial, row_sum, mask=in_tile)
        acc_at = partial_acc + partial[:, None] * BLOCK_DIM + dims[None, :]
        tl.store(acc_at, acc, mask=in_tile[:, None])


class PrefillAttention:
    """The launches of prefill attention that all layers of a step share.

    Args:
        shape: ``(query heads, key/value heads, head size)``.
        num_tokens: T, padding included.
        first_row: first row of q and out; the rows before it are decode rows.
        block_table, table_rows, seq_lens, query_start_loc, options: as for ``prefill_attention``.
        has_sinks: each call has the layer's sinks.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        block_size: int,
        num_tokens: int,
        block_table: Tensor,
        table_rows: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        *,
        scale: float,
        tiles: Tiles,
        first_row: int = 0,
        splits: int = 1,
        softcap: float | None = None,
        window: int | None = None,
        has_sinks: bool = False,
        workspace: Tensor | None = None,
    ) -> None:
        num_heads, kv_heads, head_dim = shape
        check_attention(num_heads, kv_heads, splits, window, block_table)
        num_seqs, group = seq_lens.shape[0], num_heads // kv_heads
        check_rows(num_seqs, table_rows=table_rows, seq_lens=seq_lens)
        check_rows(num_seqs + 1, query_start_loc=query_start_loc)
        group_rows = next_power_of_2(group)
        if group_rows > tiles.rows:
            raise ValueError(f"{group} query heads per key/value head: at most {tiles.rows}")
        self._num_tokens, self._first_row = num_tokens, first_row
        self._grid = (num_tiles(num_tokens, num_seqs, group, tiles), kv_heads, splits)
        self._partials: Partials | None = None
        if splits > 1:
            self._partials = Partials(
                workspace, num_tokens * splits, num_heads, head_dim, query_start_loc[num_seqs:],
                splits, keys=tiles.keys, prefill=True,
            )  # fmt: skip
        self._rows = block_table, table_rows, seq_lens, query_start_loc
        self._numbers = (num_seqs, first_row, *score_factors(scale, softcap), window or 0)
        self._stride_table = block_table.stride(0)
        self._kernel = prefill_kernel.bind(
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim_of(head_dim),
            ROWS=tiles.rows,
            GROUP_ROWS=group_rows,
            KEYS=tiles.keys,
            BLOCK_SIZE=block_size,
            SOFTCAP=softcap is not None,
            WINDOW=window is not None,
            SINKS=has_sinks,
            ONE_SPLIT=splits == 1,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def __call__(self, q: Tensor, cache: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Attention of the last T rows of ``q [first_row + T, Hq, D]``, written to ``out``."""
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
            partials.merge(out, self._num_tokens, out_strides, self._first_row)


def prefill_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    table_rows: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    first_row: int = 0,
    **options: Any,
) -> Tensor:
    """Causal attention of the last tokens of each sequence over its cached keys and values.

    Args:
        q: ``[first_row + T, Hq, D]``, the last dimension contiguous; D up to 512.
        cache: ``[2, num_blocks, block_size, Hk, D]`` with any strides, but a head spans less than
            2**31 elements; ``block_size`` a multiple of 16. It already has the queries' own keys.
        block_table: ``[N, W]`` int32.
        table_rows: ``[R]``, each row's row of ``block_table``; contiguous, like all metadata.
        seq_lens: ``[R]`` int32 or int64, tokens of each sequence up to its last query.
        query_start_loc: ``[R + 1]`` int32 or int64, ascending from 0, the first query of each row,
            counted from ``first_row``; rows may be empty, and tokens from the last entry on are
            padding.
        sinks: as in ``decode_attention``.
        out: has the shape of q; made here if None. Padding tokens, and rows before ``first_row``,
            are not written.
        first_row: first row of q and out. A slice instead could have an unaligned pointer, for
            which the kernel would be compiled anew.
        options: ``splits``, programs per tile and key/value head, from ``num_tile_splits``;
            ``scale``, ``tiles``, ``softcap``, ``window`` and ``workspace`` as in
            ``decode_attention``.

    Returns:
        ``[first_row + T, Hq, D]`` in the dtype of ``q``.

    Raises:
        ValueError: more query heads per key/value head than a tile has rows, or operands that do
            not fit one another.
    """
    num_heads, head_dim = q.shape[1:]
    num_tokens = q.shape[0] - first_row
    block_size, kv_heads = cache.shape[2:4]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    check_tensors(q, cache, out)
    if num_tokens:
        attention = PrefillAttention(
            (num_heads, kv_heads, head_dim), block_size, num_tokens, block_table, table_rows,
            seq_lens, query_start_loc, has_sinks=sinks is not None, first_row=first_row, **options,
        )  # fmt: skip
        attention(q, cache, out, sinks)
    return out
