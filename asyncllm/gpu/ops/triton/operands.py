"""Checks of kernels' operands, which kernels do not make.

With strides that it does not expect, or too few lengths, a kernel would compute wrong results or
read foreign memory.
"""

from __future__ import annotations

from torch import Tensor

from asyncllm.gpu.ops.triton.tuning import INT32_END


def row_stride(name: str, x: Tensor) -> int:
    """Stride of the rows of ``x [T, N]``, in elements.

    Raises:
        ValueError: a row is not contiguous.
    """
    stride, inner = x.stride()
    if inner != 1 and x.shape[1] > 1:
        raise ValueError(f"{name} has strides {x.stride()}: expected contiguous rows")
    return stride


def head_strides(name: str, x: Tensor) -> tuple[int, int]:
    """Strides of rows and heads of ``x [T, heads, D]``, in elements.

    Raises:
        ValueError: a head is not contiguous, or a row spans 2**31 elements or more.
    """
    row, head, inner = x.stride()
    if inner != 1 and x.shape[2] > 1:
        raise ValueError(f"{name} has strides {x.stride()}: expected contiguous heads")
    if head * x.shape[1] >= INT32_END:
        raise ValueError(f"{name} has heads {head} elements apart: expected them within 2**31")
    return row, head


def cache_strides(cache: Tensor) -> tuple[int, ...]:
    """Strides of ``cache [2, N, S, Hk, D]``, in elements.

    Kernels compute with 64 bits in all dimensions but the last.

    Raises:
        ValueError: a head spans 2**31 elements or more.
    """
    strides = cache.stride()
    if strides[4] * cache.shape[4] >= INT32_END:
        raise ValueError(
            f"a cache with elements of a head {strides[4]} apart: expected them within 2**31"
        )
    return strides


def check_attention(
    num_heads: int, num_kv_heads: int, splits: int, window: int | None, block_table: Tensor
) -> None:
    """Checks the parameters of paged attention.

    Raises:
        ValueError: a number of heads, splits or a window that kernels do not take, or gaps in rows
            of the table.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads: expected a multiple of the cache's {num_kv_heads}")
    if splits < 1:
        raise ValueError(f"splits={splits}: expected at least 1")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: expected at least 1")
    row_stride("block_table", block_table)


def check_rows(count: int, **tensors: Tensor) -> None:
    """Checks metadata of ``count`` rows.

    Raises:
        ValueError: a tensor is not ``[count]``, or not contiguous.
    """
    for name, tensor in tensors.items():
        if tensor.shape != (count,) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: expected "
                f"({count},) without gaps"
            )


def check_tensors(q: Tensor, cache: Tensor, out: Tensor) -> None:
    """Checks ``q`` and ``out [T, Hq, D]`` beside ``cache [2, N, S, Hk, D]``.

    Raises:
        ValueError: shapes do not fit one another.
    """
    if cache.shape[4] != q.shape[2] or out.shape != q.shape:
        raise ValueError(
            f"q is {tuple(q.shape)}, out {tuple(out.shape)}, the cache {tuple(cache.shape)}: "
            "expected heads of one size, and out like q"
        )
