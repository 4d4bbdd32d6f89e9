"""TritonRopeAndCache, TritonRope: QK-norm, RoPE and the KV write in one pass over q, k and v."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.head_norms import check_head_norm, norms_span_all_heads
from asyncllm.gpu.ops.triton.norm import TritonRMSNorm
from asyncllm.gpu.ops.triton.operands import cache_strides, row_stride
from asyncllm.gpu.ops.triton.tuning import cdiv, next_power_of_2

TILE_ELEMENTS = 1024
"""Number of elements per tile. A program takes the heads whose first halves fill one tile; their
second halves fill another."""


@triton.jit
def rotate(first_half, second_half, cos, sin):
    """Applies RoPE (Su et al., 2021) to the two halves of heads, in GPT-NeoX order."""
    return first_half * cos - second_half * sin, second_half * cos + first_half * sin


@triton.jit
def rope_cache_kernel(
    qkv,
    q_weight,
    k_weight,
    v_weight,
    table,
    positions,
    kv_cache,
    slot_mapping,
    eps,
    stride_qkv,
    stride_table,
    key_table_offset,
    stride_kv,
    stride_block,
    stride_slot,
    stride_head,
    stride_dim,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Norms and rotates a token's heads, and writes k and v; grid ``(tokens, blocks of heads)``.

    Heads are numbered in this order: query heads, key heads, value heads. A norm's weight is None
    if the model has no such norm. In a row of the table, the cosines and sines for keys are
    ``key_table_offset`` elements after those for queries; the offset is None if both are the same.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_HALF: tl.constexpr = triton.next_power_of_2(HALF)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    dims = tl.arange(0, BLOCK_HALF)
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    real = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dims < HALF)[None, :]
    at = qkv + token * stride_qkv + heads[:, None] * HEAD_DIM + dims[None, :]
    kind = qkv.dtype.element_ty
    raw_first = tl.load(at, mask=real, other=0.0)
    raw_second = tl.load(at + HALF, mask=real, other=0.0)
    first_half = raw_first.to(tl.float32)
    second_half = raw_second.to(tl.float32)
    if q_weight is not None:
        in_half = (dims < HALF)[None, :]
        weight_of = tl.where(is_query, q_weight, k_weight)
        if v_weight is not None:
            weight_of = tl.where(is_value, v_weight, weight_of)
        weight_at = weight_of[:, None] + dims[None, :]
        weight = tl.load(weight_at, mask=in_half, other=0.0).to(tl.float32)
        mean = (
            tl.sum(first_half * first_half + second_half * second_half, 1, keep_dims=True)
            / HEAD_DIM
        )
        scale = tl.rsqrt(mean + eps)
        first_half = first_half * scale
        second_half = second_half * scale
        # As in TritonRMSNorm, round before the multiplication by the weight unless it is float32.
        if q_weight.dtype.element_ty != tl.float32:
            first_half = first_half.to(kind).to(tl.float32)
            second_half = second_half.to(kind).to(tl.float32)
        first_half = (first_half * weight).to(kind).to(tl.float32)
        weight = tl.load(weight_at + HALF, mask=in_half, other=0.0).to(tl.float32)
        second_half = (second_half * weight).to(kind).to(tl.float32)
    table_at = table + tl.load(positions + token).to(tl.int64) * stride_table + dims[None, :]
    if key_table_offset is not None:
        table_at += tl.where(is_query, 0, key_table_offset)[:, None]
    in_table = (dims < HALF)[None, :]
    cos = tl.load(table_at, mask=in_table, other=0.0).to(tl.float32)
    sin = tl.load(table_at + HALF, mask=in_table, other=0.0).to(tl.float32)
    rotated_first, rotated_second = rotate(first_half, second_half, cos, sin)
    is_rotated = is_value[:, None] == 0
    changed = real & is_rotated
    if v_weight is not None:
        raw_first, raw_second = first_half.to(kind), second_half.to(kind)
        changed = real
    first_half = tl.where(is_rotated, rotated_first.to(kind), raw_first)
    second_half = tl.where(is_rotated, rotated_second.to(kind), raw_second)
    tl.store(at, first_half, mask=changed)
    tl.store(at + HALF, second_half, mask=changed)

    slot = tl.load(slot_mapping + token).to(tl.int64)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_head = (heads - NUM_HEADS).to(tl.int64)
    is_key = (k_head >= 0) & (k_head < NUM_KV_HEADS)
    cache_at = block * stride_block + offset * stride_slot + dims[None, :] * stride_dim
    k_at = kv_cache + cache_at + k_head[:, None] * stride_head
    tl.store(k_at, first_half.to(kv_cache.dtype.element_ty), mask=real & is_key[:, None])
    second_k = second_half.to(kv_cache.dtype.element_ty)
    tl.store(k_at + HALF * stride_dim, second_k, mask=real & is_key[:, None])
    v_head = k_head - NUM_KV_HEADS
    v_at = kv_cache + stride_kv + cache_at + v_head[:, None] * stride_head
    tl.store(v_at, first_half.to(kv_cache.dtype.element_ty), mask=real & is_value[:, None])
    second_v = second_half.to(kv_cache.dtype.element_ty)
    tl.store(v_at + HALF * stride_dim, second_v, mask=real & is_value[:, None])


class TritonRopeAndCache:
    """``RopeAndCache`` by a Triton kernel, which norms and rotates q and k in place in ``qkv``.

    Norms over all heads are separate launches before this kernel, because each of its programs has
    only some heads.
    """

    def __init__(
        self,
        shape: AttentionShape,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        v_norm: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.q_norm = self.k_norm = None
        self.v_norm, self.eps = v_norm, eps
        self.whole_norms: tuple[TritonRMSNorm, ...] = ()
        if q_norm is None or k_norm is None:
            if v_norm is not None:
                raise ValueError("a norm of values alone: expected one of queries and keys as well")
            return
        if norms_span_all_heads(shape, q_norm, k_norm):
            self.whole_norms = TritonRMSNorm(q_norm, eps), TritonRMSNorm(k_norm, eps)
        else:
            self.q_norm, self.k_norm = q_norm, k_norm
        if v_norm is not None and self.whole_norms:
            raise ValueError("a norm of values by head beside norms over all heads")

    def __call__(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q ``[T, Hq, D]``, k and v ``[T, Hk, D]``: views of ``qkv``.

        Args:
            qkv: ``[T, (Hq + 2 * Hk) * D]`` with contiguous rows; overwritten.
            rotary: the RoPE table of ``TorchOps.rotary``, ``[max_positions, D]`` or
                ``[max_positions, 2, D]``, and the positions ``[T]`` int32 or int64.
            cache: ``[2, num_blocks, block_size, Hk, D]`` with any strides, if the D elements of a
                head lie within 2**31 elements of each other.
            slot_mapping: ``[T]``, ``block * block_size + offset``; 0, a slot of the null block, for
                padding.
        """
        shape = self.shape
        table, positions = rotary
        num_q, num_k = shape.num_heads, shape.num_kv_heads
        if self.whole_norms:
            parts = qkv.split([count * shape.head_dim for count in (num_q, num_k, num_k)], 1)
            for norm, part in zip(self.whole_norms, parts, strict=False):
                norm.norm_in_place(part)
        rows = qkv.shape[0]
        if rows:
            heads = max(1, TILE_ELEMENTS // next_power_of_2(shape.head_dim // 2))
            rope_cache_kernel[rows, cdiv(num_q + 2 * num_k, heads)](
                qkv,
                self.q_norm,
                self.k_norm,
                self.v_norm,
                table,
                positions,
                cache,
                slot_mapping,
                self.eps,
                row_stride("qkv", qkv),
                table.stride(0),
                shape.head_dim if table.dim() == 3 else None,
                *cache_strides(cache),
                NUM_HEADS=num_q,
                NUM_KV_HEADS=num_k,
                HEAD_DIM=shape.head_dim,
                HEADS_PER_PROGRAM=heads,
                BLOCK_SIZE=cache.shape[2],
                num_warps=4,
            )
        split = qkv.view(rows, num_q + 2 * num_k, shape.head_dim)
        return split[:, :num_q], split[:, num_q : num_q + num_k], split[:, num_q + num_k :]


class TritonRope:
    """``Rope`` by the kernel of TritonRopeAndCache: norms and rotates q in place."""

    def __init__(self, shape: AttentionShape, norm: Tensor | None, eps: float) -> None:
        if norm is not None:
            check_head_norm(shape, norm)
        self.rope = TritonRopeAndCache(replace(shape, num_kv_heads=0), None, None, eps)
        self.rope.q_norm = self.rope.k_norm = norm

    def __call__(self, q: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """``[T, Hq * D] -> [T, Hq, D]``, in place; ``rotary`` as in TritonRopeAndCache."""
        # Without key/value heads the kernel writes no KV. Pass placeholders: the positions for the
        # slots, and a view of the RoPE table for the cache. The view's strides are constant, so
        # that the kernel is compiled once.
        table, positions = rotary
        return self.rope(q, rotary, table.as_strided((2, 1, 1, 1, 1), (0, 0, 0, 0, 1)), positions)[
            0
        ]
