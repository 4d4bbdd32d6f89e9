"""NativeRopeAndCache, NativeRope: norms of heads, RoPE and the KV write in one op."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.head_norms import check_head_norm, norms_whole_projections
from asyncllm.gpu.ops.program import DTYPES, parameter, rows_of
from asyncllm.native.context import Context, fail
from asyncllm.native.interface import RopeArgs


class NativeRopeAndCache:
    """Norms and rotates q and k in place in ``qkv``, and writes k and v to the KV cache."""

    def __init__(
        self,
        context: Context,
        shape: AttentionShape,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        v_norm: Tensor | None = None,
    ) -> None:
        self.context, self.shape, self.norms = context, shape, None
        self.args = RopeArgs(
            eps=eps, heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim
        )
        if q_norm is not None and k_norm is not None:
            self.norms = parameter(q_norm), parameter(k_norm)
            self.args.q_norm, self.args.k_norm = (norm.data_ptr() for norm in self.norms)
            self.args.whole_norms = norms_whole_projections(shape, q_norm, k_norm)
            self.args.norm_dtype = DTYPES[q_norm.dtype]
            if v_norm is not None:
                self.norms = *self.norms, parameter(v_norm)
                check_head_norm(shape, v_norm, q_norm.dtype)
                self.args.v_norm = self.norms[2].data_ptr()
        elif v_norm is not None:
            raise ValueError("a norm of values alone: expected one of queries and keys as well")

    def __call__(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``RopeAndCache``; ``rotary`` is the RoPE table and the positions."""
        (table, positions), shape, args = rotary, self.shape, self.args
        qkv = rows_of(qkv, table.dtype)
        num_tokens, dim = qkv.shape[0], shape.head_dim
        num_q, num_k = shape.num_heads, shape.num_kv_heads
        heads = qkv.view(num_tokens, num_q + 2 * num_k, dim)
        kv_strides = check_cache(cache, shape, table.dtype)
        if self.norms is not None and self.norms[0].dtype not in (table.dtype, torch.float32):
            raise ValueError(f"native rope: norms are not of {table.dtype} or torch.float32")
        for name, index in (("positions", positions), ("slots", slot_mapping)):
            if (
                index.dtype != torch.int64
                or index.shape[0] != num_tokens
                or not index.is_contiguous()
            ):
                raise ValueError(f"native rope: {name} are not {num_tokens} contiguous int64")
        args.token_stride, args.dtype = qkv.stride(0), DTYPES[qkv.dtype]
        args.table, args.table_rows = table.data_ptr(), table.shape[0]
        args.table_width = table.stride(0)
        args.cache, args.num_blocks, args.block_size = (cache.data_ptr(), *cache.shape[1:3])
        args.kv_stride, args.block_stride, args.slot_stride, args.head_stride = kv_strides
        context = self.context
        if (recorder := context.recorder) is not None:
            tensors = {"qkv": qkv, "positions": positions, "slots": slot_mapping}
            recorder.add("rope_and_cache", qkv, args, tensors, [table, cache, self.norms])
        else:
            args.qkv, args.num_tokens = qkv.data_ptr(), num_tokens
            args.positions, args.slots = positions.data_ptr(), slot_mapping.data_ptr()
            status = context.functions.rope_and_cache(context.handle, ctypes.byref(args))
            if status:
                fail("rope_and_cache", status)
        return heads[:, :num_q], heads[:, num_q : num_q + num_k], heads[:, num_q + num_k :]


class NativeRope:
    """Norms and rotates the heads of q in place."""

    def __init__(
        self, context: Context, shape: AttentionShape, norm: Tensor | None, eps: float
    ) -> None:
        self.context, self.shape, self.norm = context, shape, None
        self.args = RopeArgs(eps=eps, heads=shape.num_heads, head_dim=shape.head_dim)
        if norm is not None:
            check_head_norm(shape, norm)
            self.norm = parameter(norm)
            self.args.q_norm, self.args.norm_dtype = self.norm.data_ptr(), DTYPES[norm.dtype]

    def __call__(self, q: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """See ``Rope``; ``rotary`` is the RoPE table and the positions."""
        (table, positions), args, context = rotary, self.args, self.context
        q = rows_of(q, table.dtype)
        heads = q.view(len(q), self.shape.num_heads, self.shape.head_dim)
        if (
            positions.dtype != torch.int64
            or len(positions) != len(q)
            or not positions.is_contiguous()
        ):
            raise ValueError(f"native rope: positions are not {len(q)} contiguous int64")
        args.token_stride, args.dtype = q.stride(0), DTYPES[q.dtype]
        args.table, args.table_rows = table.data_ptr(), table.shape[0]
        args.table_width = table.stride(0)
        if (recorder := context.recorder) is not None:
            tensors = {"qkv": q, "positions": positions}
            recorder.add("rope_and_cache", q, args, tensors, [table, self.norm])
            return heads
        args.qkv, args.num_tokens, args.positions = q.data_ptr(), len(q), positions.data_ptr()
        status = context.functions.rope_and_cache(context.handle, ctypes.byref(args))
        if status:
            fail("rope_and_cache", status)
        return heads


def check_cache(cache: Tensor, shape: AttentionShape, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the strides of a layer's KV cache without the last, which is 1.

    Raises:
        ValueError: another shape, dtype, device or last stride: the cache is written in place.
    """
    expected = (2, shape.num_kv_heads, shape.head_dim)
    found = (cache.shape[0], *cache.shape[3:])
    *strides, last = cache.stride()
    if found != expected or cache.dtype != dtype or cache.device.type != "cpu" or last != 1:
        raise ValueError(
            f"native ops: a KV cache {tuple(cache.shape)} of {cache.dtype} on {cache.device}, "
            f"expected [2, blocks, tokens, {shape.num_kv_heads}, {shape.head_dim}] of {dtype}"
        )
    return tuple(strides)
