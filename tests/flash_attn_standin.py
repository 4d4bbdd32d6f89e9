"""FlashAttention's functions in plain torch: the same signatures, exact results.

From the documented meaning of their arguments: query i of a row with n queries and m keys sees
the keys ``i + m - n - left`` to ``i + m - n + right``, -1 being no limit, and ``causal`` a right
of 0; a query that sees nothing gives zeros. What the libraries' C++ checks of layouts and
dtypes is checked here, and what has to hold of the maxima, which they trust.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor


def flash_attn_2() -> ModuleType:
    module = ModuleType("flash_attn")
    module.__version__ = "2.8.3.post2"  # pyright: ignore[reportAttributeAccessIssue]
    module.flash_attn_varlen_func = varlen_2  # pyright: ignore[reportAttributeAccessIssue]
    module.flash_attn_with_kvcache = with_kvcache_2  # pyright: ignore[reportAttributeAccessIssue]
    return module


def flash_attn_3() -> ModuleType:
    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = with_kvcache_3  # pyright: ignore[reportAttributeAccessIssue]
    return module


def varlen_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    check_integers(q, cu_seqlens_q, cu_seqlens_k, block_table)
    assert len(cu_seqlens_k) == len(cu_seqlens_q) == len(block_table) + 1
    lengths = cu_seqlens_k.diff()
    assert int(lengths.max()) <= max_seqlen_k
    return varlen(
        q,
        (k, v),
        cu_seqlens_q,
        max_seqlen_q,
        lengths,
        block_table,
        (softmax_scale, causal, window_size, softcap),
    )


def with_kvcache_2(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert k is None
    assert v is None
    options = (softmax_scale, causal, window_size, softcap)
    return batched(q, (k_cache, v_cache), cache_seqlens, block_table, options)


def with_kvcache_3(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    assert k is None
    assert v is None
    options = (softmax_scale, causal, window_size, softcap)
    if cu_seqlens_q is None:
        return batched(q, (k_cache, v_cache), cache_seqlens, page_table, options)
    assert max_seqlen_q is not None
    check_integers(q, cu_seqlens_q, cache_seqlens, page_table)
    return varlen(
        q, (k_cache, v_cache), cu_seqlens_q, max_seqlen_q, cache_seqlens, page_table, options
    )


def batched(q, cache, lengths, table, options) -> Tensor:
    """q ``[B, n, Hq, D]``."""
    check_integers(q, lengths, table)
    assert q.dim() == 4
    assert len(q) == len(lengths) == len(table)
    rows = zip(q, lengths.tolist(), table, strict=True)
    return torch.stack([attend(row, cache, length, ids, options) for row, length, ids in rows])


def varlen(q, cache, starts, max_queries, lengths, table, options) -> Tensor:
    """q ``[T, Hq, D]``. Tokens past the last row keep what the memory held."""
    assert q.dim() == 3
    assert len(starts) == len(lengths) + 1 == len(table) + 1
    assert int(starts[0]) == 0
    assert 0 < int(starts.diff().max()) <= max_queries
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    for row, length in enumerate(lengths.tolist()):
        queries = slice(int(starts[row]), int(starts[row + 1]))
        out[queries] = attend(q[queries], cache, length, table[row], options)
    return out


def check_integers(q: Tensor, *integers: Tensor) -> None:
    for tensor in integers:
        assert tensor.dtype == torch.int32
        assert tensor.device == q.device
        assert tensor.is_contiguous()


def attend(q: Tensor, cache, length: int, table: Tensor, options) -> Tensor:
    """One row, q ``[n, Hq, D]``."""
    scale, causal, (left, right), softcap = options
    right = 0 if causal else right
    for tensor in (q, *cache):
        assert tensor.dtype in (torch.float16, torch.bfloat16)
        assert tensor.dtype == q.dtype
        assert tensor.stride(-1) == 1
    count, heads, dim = q.shape
    block_size, kv_heads = cache[0].shape[1:3]
    assert heads % kv_heads == 0
    assert dim % 8 == 0
    assert dim <= 256
    used = -(-length // block_size)
    assert used <= len(table), "the block table is too narrow"
    blocks = table[:used].long()
    k, v = (side[blocks].flatten(0, 1)[:length].double() for side in cache)
    k, v = (side.repeat_interleave(heads // kv_heads, 1) for side in (k, v))
    scale = dim**-0.5 if scale is None else scale
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length) - (torch.arange(count) + length - count).unsqueeze(1)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if right >= 0:
        seen &= distance <= right
    if left >= 0:
        seen &= distance >= -left
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype)
