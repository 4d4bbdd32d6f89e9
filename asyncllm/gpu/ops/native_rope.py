"""NativeRopeAndCache, NativeRope: QK-norm, RoPE and the KV write in one C++ op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.head_norms import check_head_norm, norms_span_all_heads
from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.program import DTYPE_CODES, contiguous_parameter, contiguous_rows
from asyncllm.native.context import NativeContext


class _NativeRopeBase:
    """Base of the ops that normalise and rotate heads in place.

    Args:
        kv_heads: number of key/value heads in the input, beside the shape's query heads.
        norms: weights of the norms, by the names of the op's arguments.
    """

    def __init__(
        self, context: NativeContext, shape: AttentionShape, kv_heads: int, eps: float,
        **norms: Tensor | None,
    ) -> None:  # fmt: skip
        self.shape, self._num_heads = shape, shape.num_heads + 2 * kv_heads
        weights: dict[str, Any] = {
            name: contiguous_parameter(norm) for name, norm in norms.items() if norm is not None
        }
        self._norm_dtypes = {norm.dtype for norm in weights.values()} - {torch.float32}
        self._op = NativeOp(
            context, "rope_and_cache", eps=eps, heads=shape.num_heads, kv_heads=kv_heads,
            head_dim=shape.head_dim, **weights,
        )  # fmt: skip
        for norm in weights.values():
            self._op.args.norm_dtype = DTYPE_CODES[norm.dtype]

    def _norm_and_rotate(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], slots: dict[str, Tensor],
        keep_alive: list[Tensor],
    ) -> Tensor:  # fmt: skip
        """Normalises and rotates ``qkv`` in place; returns it as ``[T, heads, D]``."""
        (table, positions), args = rotary, self._op.args
        qkv = contiguous_rows(qkv, table.dtype)
        count = qkv.shape[0]
        heads = qkv.view(count, self._num_heads, self.shape.head_dim)
        if self._norm_dtypes - {table.dtype}:
            raise ValueError(f"native rope: norms are not of {table.dtype} or torch.float32")
        indices = {"positions": positions} | slots
        for name, index in indices.items():
            if index.dtype != torch.int64 or index.shape[0] != count or not index.is_contiguous():
                raise ValueError(f"native rope: {name} are not {count} contiguous int64")
        args.token_stride, args.dtype = qkv.stride(0), DTYPE_CODES[qkv.dtype]
        args.table, args.table_rows = table.data_ptr(), table.shape[0]
        args.table_width = table.stride(0)
        self._op(qkv, {"qkv": qkv} | indices, [table, *keep_alive])
        return heads


class NativeRope(_NativeRopeBase):
    """``Rope`` in C++, which normalises and rotates q in place."""

    def __init__(
        self, context: NativeContext, shape: AttentionShape, norm: Tensor | None, eps: float
    ) -> None:
        if norm is not None:
            check_head_norm(shape, norm)
        super().__init__(context, shape, 0, eps, q_norm=norm)

    def __call__(self, q: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """See ``Rope``; ``rotary`` is the RoPE table and the positions."""
        return self._norm_and_rotate(q, rotary, {}, [])


class NativeRopeAndCache(_NativeRopeBase):
    """``RopeAndCache`` in C++, which normalises and rotates q and k in place in ``qkv``."""

    def __init__(
        self,
        context: NativeContext,
        shape: AttentionShape,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        v_norm: Tensor | None = None,
    ) -> None:
        whole = False
        if q_norm is not None and k_norm is not None:
            whole = norms_span_all_heads(shape, q_norm, k_norm)
            if v_norm is not None:
                check_head_norm(shape, v_norm, q_norm.dtype)
        elif v_norm is not None:
            raise ValueError("a norm of values alone: expected one of queries and keys as well")
        super().__init__(
            context, shape, shape.num_kv_heads, eps, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm
        )
        self._op.args.whole_norms = whole

    def __call__(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``RopeAndCache``; ``rotary`` is the RoPE table and the positions."""
        set_cache_args(self._op.args, cache, self.shape, rotary[0].dtype)
        heads = self._norm_and_rotate(qkv, rotary, {"slots": slot_mapping}, [cache])
        num_q, num_k = self.shape.num_heads, self.shape.num_kv_heads
        return heads[:, :num_q], heads[:, num_q : num_q + num_k], heads[:, num_q + num_k :]


def set_cache_args(args: Any, cache: Tensor, shape: AttentionShape, dtype: torch.dtype) -> None:
    """Sets those arguments of an op that describe a layer's KV cache.

    Raises:
        ValueError: the op cannot write a cache of this shape, dtype, device or last stride.
    """
    expected = (2, shape.num_kv_heads, shape.head_dim)
    fixed_dims = (cache.shape[0], *cache.shape[3:])
    *strides, last = cache.stride()
    if fixed_dims != expected or cache.dtype != dtype or cache.device.type != "cpu" or last != 1:
        raise ValueError(
            f"native ops: a KV cache {tuple(cache.shape)} of {cache.dtype} on {cache.device}, "
            f"expected [2, blocks, tokens, {shape.num_kv_heads}, {shape.head_dim}] of {dtype}"
        )
    args.kv_stride, args.block_stride, args.slot_stride, args.head_stride = strides
    args.cache, args.num_blocks, args.block_size = (cache.data_ptr(), *cache.shape[1:3])
