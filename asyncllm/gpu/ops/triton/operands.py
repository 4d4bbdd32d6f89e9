"""row_stride, head_strides, cache_strides: checked strides of kernels' operands.

Kernels check nothing: a kernel computes wrong results, or reads memory outside the tensor, if it
does not support the strides.
"""

from __future__ import annotations

from torch import Tensor

from asyncllm.gpu.ops.triton.tuning import INT32_END


def row_stride(name: str, x: Tensor) -> int:
    """Stride of the rows of ``x [T, N]``, in elements.

    Raises:
        ValueError: the rows are not contiguous.
    """
    stride, inner = x.stride()
    if inner != 1 and x.shape[1] > 1:
        raise ValueError(f"{name} has strides {x.stride()}: expected contiguous rows")
    return stride


def head_strides(name: str, x: Tensor) -> tuple[int, int]:
    """Strides of rows and heads of ``x [T, heads, D]``, in elements.

    Raises:
        ValueError: the heads are not contiguous, or a row spans 2**31 elements or more.
    """
    row, head, inner = x.stride()
    if inner != 1 and x.shape[2] > 1:
        raise ValueError(f"{name} has strides {x.stride()}: expected contiguous heads")
    if head * x.shape[1] >= INT32_END:
        raise ValueError(f"{name} has heads {head} elements apart: expected them within 2**31")
    return row, head


def cache_strides(cache: Tensor) -> tuple[int, ...]:
    """Strides of ``cache [2, N, S, Hk, D]``, in elements.

    Kernels compute offsets in 64 bits in all dimensions but the last.

    Raises:
        ValueError: a head spans 2**31 elements or more.
    """
    strides = cache.stride()
    if strides[4] * cache.shape[4] >= INT32_END:
        raise ValueError(
            f"a cache with elements of a head {strides[4]} apart: expected them within 2**31"
        )
    return strides
