"""PrefillAttention: paged attention of several query tokens per sequence, after a cached prefix.

The rows of a tile are pairs of a query token and a query head of one key/value head, with the heads
padded to a power of two. The grid is an upper bound on the number of tiles, which the host knows
without the lengths. Each program finds its tile's sequence by binary search, and returns if there
is none. The last tiles, which have the most keys, are launched first, so that fewer multiprocessors
idle at the end. If there are few tiles, the keys of each are split among programs
(``merge_attention.py``).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import triton
import triton.language as tl

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention_plan import TritonPlan
from asyncllm.gpu.ops.triton.attention_tile import LOG2_E, attend_tile, padded_head_dim
from asyncllm.gpu.ops.triton.paged_attention import MergeArguments, PagedAttention
from asyncllm.gpu.ops.triton.tuning import Tiles, num_tiles


@triton.jit
def find_sequence(query_start_loc, num_seqs, tile, TOKENS: tl.constexpr):
    """Index of a tile's sequence: the last sequence whose first tile is at or before ``tile``.

    The first tile of sequence s is ``query_start_loc[s] // TOKENS + s``, which leaves each sequence
    at least as many tiles as it needs.
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


# Prefill rows come after the step's decode rows, so that the number of decode rows determines the
# alignments of prefill metadata. A kernel specialised on the alignments would be compiled again
# while requests are served.
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
):
    """Computes attention of a tile of queries over a split of their keys.

    Grid ``(tiles, kv_heads, splits)``. A tile is ``ROWS / GROUP_ROWS`` tokens of one sequence.
    Token 0 is row ``first_row`` of q and out. Partial results are ``[tokens, heads, splits]``;
    accumulators have a last dimension of BLOCK_DIM.

    A token has GROUP_ROWS rows in a tile: GROUP rounded up to a power of two, because a division by
    another number would need registers that a full tile does not leave.
    """
    BLOCK_DIM: tl.constexpr = padded_head_dim(HEAD_DIM)
    GROUP_ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
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
    first_visible_key = prefix + offset - window + 1
    # With more than 256 elements per row of the accumulator, two loops would spill registers.
    ONE_LOOP: tl.constexpr = WINDOW or BLOCK_DIM > 256
    start = 0
    if WINDOW:
        start = tl.maximum(first_visible_key, 0) // KEYS * KEYS
    unmasked_end = start
    if not ONE_LOOP:
        unmasked_end = (prefix + offset + 1) // KEYS * KEYS
    if not ONE_SPLIT:
        per_split = tl.cdiv(tl.cdiv(end - start, KEYS), splits) * KEYS
        start += split * per_split
        end = tl.minimum(start + per_split, end)
        unmasked_end = tl.minimum(tl.maximum(unmasked_end, start), end)

    table_row = tl.load(table_rows + seq).to(tl.int64)
    table = block_table + table_row * stride_table
    at_head = kv_head.to(tl.int64) * stride_head
    k_cache = kv_cache + at_head
    cache = (k_cache, k_cache + stride_kv, table, stride_block, stride_slot, stride_dim)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        # The sink is a key without a value; only the first split counts it.
        if split == 0:
            row_max = tl.load(sinks + heads, mask=in_tile, other=0.0) * LOG2_E
            row_sum += 1.0
    if not ONE_LOOP:
        for first_key in range(start, unmasked_end, KEYS):
            acc, row_max, row_sum = attend_tile(
                queries, acc, row_max, row_sum, cache, first_key, positions, first_visible_key,
                kv_len, (score_scale, softcap), window, HEAD_DIM, KEYS, BLOCK_SIZE, WINDOW, False,
            )  # fmt: skip
    for first_key in range(unmasked_end, end, KEYS):
        acc, row_max, row_sum = attend_tile(
            queries, acc, row_max, row_sum, cache, first_key, positions, first_visible_key, kv_len,
            (score_scale, softcap), window, HEAD_DIM, KEYS, BLOCK_SIZE, WINDOW, True,
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


class PrefillAttention(PagedAttention):
    """Causal attention of a plan's prefill rows over the cache.

    The queries are the last tokens of each sequence. Rows of ``out`` that belong to padding or to
    decode rows are not written.

    Args:
        tiles: launch shape; its ``rows`` are at least the query heads per key/value head.
        num_tokens: number of query tokens of prefill rows, padding included.
    """

    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        tiles: Tiles,
        plan: TritonPlan,
        num_tokens: int,
    ) -> None:
        # Pass the number of the first prefill row instead of a pointer to it. Where the bytes of a
        # row are no multiple of 16, the pointer's alignment would vary with the number of decode
        # rows, and Triton compiles a kernel per alignment.
        first, starts, splits = plan.num_decodes, plan.query_start_loc, plan.tile_splits
        assert starts is not None
        num_seqs, group = len(plan.seq_lens) - first, shape.group_size
        merge = None
        if splits > 1:
            merge = MergeArguments(
                num_tokens * splits, num_tokens, starts[num_seqs:], splits, first, prefill=True
            )
        super().__init__(
            prefill_kernel, shape, block_size, tiles, plan,
            (num_tiles(num_tokens, num_seqs, group, tiles), shape.num_kv_heads, splits),
            (plan.block_table, plan.table_rows[first:], plan.seq_lens[first:], starts),
            (num_seqs, first), merge,
        )  # fmt: skip
