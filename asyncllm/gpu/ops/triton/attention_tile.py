"""Loop body of the attention kernels: a tile of queries against a tile of cached keys.

The online softmax is that of Milakov and Gimelshein (2018), as used by FlashAttention (Dao
et al., 2022); the paging is that of PagedAttention (Kwon et al., 2023). Scores are kept in
base 2, like the hardware's exponential.
"""

import triton
import triton.language as tl

from asyncllm.gpu.ops.triton.tuning import block_dim_of

LOG2_E = tl.constexpr(1.4426950408889634)

padded_head_dim = triton.constexpr_function(block_dim_of)


def score_factors(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Converts a model's scale and soft cap to arguments of ``score_tile``."""
    if softcap is None:
        return scale * LOG2_E.value, None
    return scale / softcap, softcap * LOG2_E.value


@triton.jit
def score_tile(q, k, score_scale, softcap):
    """Scores of queries and keys in base 2.

    Without a soft cap ``softcap`` is None, and ``score_scale`` is ``scale * log2(e)``. With one,
    ``score_scale`` is ``scale / cap``, and ``softcap`` is the cap times log2(e).
    """
    scores = tl.dot(q, k, input_precision="ieee") * score_scale
    if softcap is not None:
        # Computed by exp2, tanh is exact even for scores at which exp2 is infinite or 0.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * 2.885390081777927) + 1.0))
    return scores


@triton.jit
def attend_tile(
    q,
    acc,
    row_max,
    row_sum,
    cache,
    first_key,
    positions,
    first_visible_key,
    kv_len,
    score_params,
    window,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    NEEDS_MASK: tl.constexpr,
):
    """Adds keys ``first_key`` to ``first_key + KEYS - 1`` to the online softmax.

    Without NEEDS_MASK, all of these keys have to be in the cache and visible to every row.

    Args:
        q: ``[rows, BLOCK_DIM]``.
        acc, row_max, row_sum: float32 state of the softmax; the maximum is of scores in base 2.
        cache: pointers to the keys and to the values of one key/value head, the pointer to the
            sequence's block table, and the strides of blocks, slots and elements.
        positions: ``[rows]``, index of the last key that each row sees.
        first_visible_key: with WINDOW, index of the first key that any row sees. Blocks before it
            are never read: another sequence may own them by now and have written NaN, and a weight
            of 0 times NaN is NaN.
        score_params: ``score_scale`` and ``softcap`` of ``score_tile``.
        kv_len: number of the sequence's tokens in the cache; slots after them are never read.
    """
    BLOCK_DIM: tl.constexpr = q.shape[1]
    k_cache, v_cache, table, stride_block, stride_slot, stride_dim = cache
    keys = first_key + tl.arange(0, KEYS)
    dims = tl.arange(0, BLOCK_DIM)
    exists = keys < kv_len
    if WINDOW:
        exists &= keys >= first_visible_key
    if NEEDS_MASK:
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0)
    else:
        blocks = tl.load(table + keys // BLOCK_SIZE)
    # Offsets need 64 bits: a large cache has more than 2**31 elements.
    blocks = blocks.to(tl.int64)
    slots = (keys % BLOCK_SIZE).to(tl.int64)
    at = blocks * stride_block + slots * stride_slot
    k_at = k_cache + at[None, :] + dims[:, None] * stride_dim
    v_at = v_cache + at[:, None] + dims[None, :] * stride_dim
    if NEEDS_MASK:
        real = exists[None, :] & (dims < HEAD_DIM)[:, None]
        k = tl.load(k_at, mask=real, other=0.0)
    elif BLOCK_DIM != HEAD_DIM:
        k = tl.load(k_at, mask=(dims < HEAD_DIM)[:, None], other=0.0)
    else:
        k = tl.load(k_at)
    scores = score_tile(q, k, *score_params)
    if NEEDS_MASK:
        visible = exists[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW:
            visible &= keys[None, :] > positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # Subtract 0 in a row that has seen no key yet: minus infinity less itself is NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    if NEEDS_MASK:
        real = exists[:, None] & (dims < HEAD_DIM)[None, :]
        v = tl.load(v_at, mask=real, other=0.0)
    elif BLOCK_DIM != HEAD_DIM:
        v = tl.load(v_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        v = tl.load(v_at)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum
