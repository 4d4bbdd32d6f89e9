"""QK-norm, rotation and the write into the paged cache, in one pass over q, k and v."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker takes a kernel for the function that it is written as.

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.tuning import cdiv, next_power_of_2

TILE_ELEMENTS = 1024
"""Elements of half heads that a program holds."""


@triton.jit
def rotate(first, second, cos, sin):
    """Both halves of each head, turned (GPT-NeoX order; Su et al., 2021)."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def rope_cache_kernel(
    qkv,
    q_weight,
    k_weight,
    table,
    positions,
    k_cache,
    v_cache,
    slot_mapping,
    eps,
    stride_qkv,
    stride_table,
    stride_block,
    stride_slot,
    stride_head,
    stride_dim,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Grid ``(tokens, blocks of HEADS)`` over the query, key and value heads in a row."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_HALF)
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + KV_HEADS
    real = (heads < NUM_HEADS + 2 * KV_HEADS)[:, None] & (dims < HALF)[None, :]
    at = qkv + token * stride_qkv + heads[:, None] * HEAD_DIM + dims[None, :]
    kind = qkv.dtype.element_ty
    raw_first = tl.load(at, mask=real, other=0.0)
    raw_second = tl.load(at + HALF, mask=real, other=0.0)
    first = raw_first.to(tl.float32)
    second = raw_second.to(tl.float32)
    if NORM:
        in_half = (dims < HALF)[None, :]
        weight_at = tl.where(is_query[:, None], q_weight, k_weight) + dims[None, :]
        weight = tl.load(weight_at, mask=in_half, other=0.0).to(tl.float32)
        mean = tl.sum(first * first + second * second, 1, keep_dims=True) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)
        # Rounded where the norm's own output would be.
        first = ((first * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
        weight = tl.load(weight_at + HALF, mask=in_half, other=0.0).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
    line = table + tl.load(positions + token).to(tl.int64) * stride_table
    cos = tl.load(line + dims, mask=dims < HALF, other=0.0)
    sin = tl.load(line + HALF + dims, mask=dims < HALF, other=0.0)
    cos = cos.to(tl.float32)[None, :]
    sin = sin.to(tl.float32)[None, :]
    turned_first, turned_second = rotate(first, second, cos, sin)
    is_turned = is_value[:, None] == 0
    first = tl.where(is_turned, turned_first.to(kind), raw_first)
    second = tl.where(is_turned, turned_second.to(kind), raw_second)
    tl.store(at, first, mask=real & is_turned)
    tl.store(at + HALF, second, mask=real & is_turned)

    slot = tl.load(slot_mapping + token).to(tl.int64)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_head = (heads - NUM_HEADS).to(tl.int64)
    is_key = (k_head >= 0) & (k_head < KV_HEADS)
    cache_at = block * stride_block + offset * stride_slot + dims[None, :] * stride_dim
    k_at = k_cache + cache_at + k_head[:, None] * stride_head
    tl.store(k_at, first.to(k_cache.dtype.element_ty), mask=real & is_key[:, None])
    second_k = second.to(k_cache.dtype.element_ty)
    tl.store(k_at + HALF * stride_dim, second_k, mask=real & is_key[:, None])
    v_head = k_head - KV_HEADS
    v_at = v_cache + cache_at + v_head[:, None] * stride_head
    tl.store(v_at, first.to(v_cache.dtype.element_ty), mask=real & is_value[:, None])
    second_v = second.to(v_cache.dtype.element_ty)
    tl.store(v_at + HALF * stride_dim, second_v, mask=real & is_value[:, None])


class TritonRopeAndCache:
    """Norms q and k by head where the model does, rotates both, and writes k and v."""

    def __init__(
        self, shape: AttentionShape, q_norm: Tensor | None, k_norm: Tensor | None, eps: float
    ) -> None:
        self.shape = shape
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.eps = eps

    def __call__(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q ``[T, Hq, D]``, k and v ``[T, Hk, D]``: views of ``qkv``.

        Args:
            qkv: ``[T, (Hq + 2 * Hk) * D]``, rows contiguous; q and k are overwritten.
            rotary: the table ``[max_positions, D]``, cosines, then sines, of half a head each;
                and the positions ``[T]`` int32 or int64.
            cache: ``[2, num_blocks, block_size, Hk, D]``, any strides.
            slot_mapping: ``[T]``, ``block * block_size + offset``; 0, in the null block, for
                padding.
        """
        shape = self.shape
        table, positions = rotary
        num_q, num_k, half = shape.num_heads, shape.num_kv_heads, shape.head_dim // 2
        block_half = next_power_of_2(half)
        heads = max(1, TILE_ELEMENTS // block_half)
        if qkv.shape[0]:
            rope_cache_kernel[(qkv.shape[0], cdiv(num_q + 2 * num_k, heads))](
                qkv,
                self.q_norm if self.q_norm is not None else qkv,
                self.k_norm if self.k_norm is not None else qkv,
                table,
                positions,
                cache[0],
                cache[1],
                slot_mapping,
                self.eps,
                qkv.stride(0),
                table.stride(0),
                *cache.stride()[1:],
                NUM_HEADS=num_q,
                KV_HEADS=num_k,
                HEAD_DIM=shape.head_dim,
                HALF=half,
                BLOCK_HALF=block_half,
                HEADS=heads,
                BLOCK_SIZE=cache.shape[2],
                NORM=self.q_norm is not None,
                num_warps=4,
            )
        split = qkv.view(qkv.shape[0], num_q + 2 * num_k, shape.head_dim)
        return split[:, :num_q], split[:, num_q : num_q + num_k], split[:, num_q + num_k :]
