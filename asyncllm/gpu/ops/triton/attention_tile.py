"""One step of paged attention: a tile of queries against a tile of cached keys.

The online softmax is that of Milakov and Gimelshein (2018), as used by FlashAttention (Dao
et al., 2022); the paging is that of PagedAttention (Kwon et al., 2023). Scores are kept in
base 2, like the hardware's exponential.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """``score_scale`` and ``softcap`` of ``score_tile`` for a model's scale and cap."""
    if softcap is None:
        return scale * LOG2_E.value, 0.0
    return scale / softcap, softcap * LOG2_E.value


@triton.jit
def score_tile(q, k, score_scale, softcap, SOFTCAP: tl.constexpr):
    """Scores of queries and keys in base 2.

    Without a cap ``score_scale`` is ``scale * log2(e)``. With SOFTCAP it is ``scale / softcap``,
    and ``softcap`` is the cap times log2(e).
    """
    scores = tl.dot(q, k, input_precision="ieee") * score_scale
    if SOFTCAP:
        # tanh through exp2: exact at both ends, where exp2 is infinite or zero.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * 2.885390081777927) + 1.0))
    return scores


@triton.jit
def attend_tile(
    q,
    acc,
    row_max,
    row_sum,
    k_cache,
    v_cache,
    table,
    stride_block,
    stride_slot,
    stride_dim,
    first_key,
    positions,
    first_seen,
    kv_len,
    score_scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds keys ``first_key`` to ``first_key + KEYS - 1`` to the running softmax.

    Without MASKED all of them have to exist and be visible to every row.

    Args:
        q: ``[rows, BLOCK_DIM]``.
        acc, row_max, row_sum: state of the softmax, float32; the maximum is in base 2.
        k_cache, v_cache: this key/value head's part of the cache, with the same strides.
        table: the sequence's block table.
        positions: ``[rows]``, the last key that each row sees.
        first_seen: with WINDOW, the first key that any row sees. Earlier blocks may belong to
            others by now and are never read: zero times their NaN would be NaN.
        kv_len: tokens in the cache; later slots are stale and never read.
    """
    keys = first_key + tl.arange(0, KEYS)
    dims = tl.arange(0, BLOCK_DIM)
    exists = keys < kv_len
    if WINDOW:
        exists &= keys >= first_seen
    if MASKED:
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0)
    else:
        blocks = tl.load(table + keys // BLOCK_SIZE)
    # A large cache has more than 2**31 elements.
    blocks = blocks.to(tl.int64)
    slots = (keys % BLOCK_SIZE).to(tl.int64)
    at = blocks * stride_block + slots * stride_slot
    k_at = k_cache + at[None, :] + dims[:, None] * stride_dim
    v_at = v_cache + at[:, None] + dims[None, :] * stride_dim
    if MASKED:
        real = exists[None, :] & (dims < HEAD_DIM)[:, None]
        k = tl.load(k_at, mask=real, other=0.0)
    elif BLOCK_DIM != HEAD_DIM:
        k = tl.load(k_at, mask=(dims < HEAD_DIM)[:, None], other=0.0)
    else:
        k = tl.load(k_at)
    scores = score_tile(q, k, score_scale, softcap, SOFTCAP)
    if MASKED:
        visible = exists[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW:
            visible &= keys[None, :] > positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet has no maximum to subtract.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    if MASKED:
        real = exists[:, None] & (dims < HEAD_DIM)[None, :]
        v = tl.load(v_at, mask=real, other=0.0)
    elif BLOCK_DIM != HEAD_DIM:
        v = tl.load(v_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        v = tl.load(v_at)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum
