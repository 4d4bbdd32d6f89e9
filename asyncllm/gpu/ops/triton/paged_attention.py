"""PagedAttention: the launches of decode or prefill attention, with the merge behind them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention_tile import score_factors
from asyncllm.gpu.ops.triton.merge_attention import Partials
from asyncllm.gpu.ops.triton.operands import cache_strides, head_strides
from asyncllm.gpu.ops.triton.tuning import Tiles, block_dim_of


class PagedAttention:
    """The launches that all layers of a step share.

    Args:
        kernel: ``decode_kernel`` or ``prefill_kernel``.
        block_size: tokens of a KV block.
        metadata: the block table and tensors of the rows, in the kernel's order.
        counts: the kernel's numbers before the factors on scores.
        window: keys that a query sees, its own included; None is all.
        partials: partial results to merge; None if no keys are divided.
        num_tokens: rows of ``out`` to merge, from ``first_row`` on.
        constants: the kernel's other constants.
    """

    def __init__(
        self,
        kernel: Any,
        shape: AttentionShape,
        block_size: int,
        tiles: Tiles,
        grid: tuple[int, int, int],
        metadata: tuple[Tensor, ...],
        counts: tuple[int, ...],
        window: int | None,
        partials: Partials | None,
        num_tokens: int,
        first_row: int = 0,
        **constants: Any,
    ) -> None:
        self._grid, self._metadata = grid, metadata
        self._numbers = (*counts, *score_factors(shape.scale, shape.softcap), window or 0)
        self._partials, self._num_tokens, self._first_row = partials, num_tokens, first_row
        self._kernel = kernel.bind(
            GROUP=shape.group_size,
            HEAD_DIM=shape.head_dim,
            BLOCK_DIM=block_dim_of(shape.head_dim),
            ROWS=tiles.rows,
            KEYS=tiles.keys,
            BLOCK_SIZE=block_size,
            SOFTCAP=shape.softcap is not None,
            WINDOW=window is not None,
            SINKS=shape.sinks,
            ONE_SPLIT=partials is None,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **constants,
        )

    def __call__(self, q: Tensor, cache: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Attention of the rows of ``q [T, Hq, D]``, written to those of ``out``.

        Args:
            q: the last dimension contiguous; D up to 512.
            cache: ``[2, num_blocks, block_size, Hk, D]`` with any strides, but a head spans less
                than 2**31 elements. It already has the rows' own keys.
            sinks: ``[Hq]`` float32, for a shape with sinks.

        Raises:
            ValueError: strides that the kernels do not take.
        """
        partials, out_strides = self._partials, head_strides("out", out)
        self._kernel(
            self._grid,
            out,
            *((out, out, out) if partials is None else partials.tensors),
            q,
            cache,
            *self._metadata,
            out if sinks is None else sinks,
            *self._numbers,
            *out_strides,
            *head_strides("q", q),
            *cache_strides(cache),
            self._metadata[0].stride(0),
        )
        if partials is not None:
            partials.merge(out, self._num_tokens, out_strides, self._first_row)
