"""check_head_norm, norms_span_all_heads: check the weights of query, key and value norms."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape


def check_head_norm(shape: AttentionShape, norm: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raises ValueError unless ``norm`` is a per-head weight ``[D]`` of ``dtype``."""
    if norm.shape != (shape.head_dim,) or norm.dtype != (dtype or norm.dtype):
        expected = f"[{shape.head_dim}]" + (f" of {dtype}" if dtype else "")
        raise ValueError(
            f"norm of heads is {tuple(norm.shape)} of {norm.dtype}, expected {expected}"
        )


def norms_span_all_heads(shape: AttentionShape, q_norm: Tensor, k_norm: Tensor) -> bool:
    """Whether q and k are normed over all heads together, instead of per head.

    Raises:
        ValueError: the weights have neither of the two shapes, or different dtypes.
    """
    dim = shape.head_dim
    shapes = tuple(q_norm.shape), tuple(k_norm.shape)
    whole = (shape.num_heads * dim,), (shape.num_kv_heads * dim,)
    if shapes not in (((dim,), (dim,)), whole) or q_norm.dtype != k_norm.dtype:
        raise ValueError(
            f"norms of q and k are {shapes} of {q_norm.dtype} and {k_norm.dtype}, expected [{dim}] "
            f"or {whole} of one dtype"
        )
    return shapes == whole and shapes != ((dim,), (dim,))
