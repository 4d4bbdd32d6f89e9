"""PagedAttention: launches of the decode or prefill kernel, and of the merge after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention_tile import score_factors
from asyncllm.gpu.ops.triton.merge_attention import Partials
from asyncllm.gpu.ops.triton.operands import cache_strides, head_strides
from asyncllm.gpu.ops.triton.tuning import Tiles, block_dim_of


class PagedAttention:
    """A bound attention kernel and its merge, for all layers of a step.

    Args:
        kernel: ``decode_kernel`` or ``prefill_kernel``.
        block_size: tokens per KV block.
        metadata: the kernel's arguments from ``block_table`` up to ``sinks``.
        counts: the kernel's arguments from ``sinks`` up to ``score_scale``.
        window: number of keys that a query sees, its own included; None is all.
        partials: partial results to merge; None if there is only one split.
        num_tokens: number of rows of ``out`` to merge, from ``first_row`` on.
        constants: constants that only one of the kernels has.
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
        """Writes the attention of the kernel's rows of ``q [T, Hq, D]`` to ``out [T, Hq, D]``.

        Args:
            q: queries, with a contiguous last dimension; D is up to 512.
            cache: ``[2, num_blocks, block_size, Hk, D]``, which already contains the rows' own keys
                and values. Strides may be any, but a head spans less than 2**31 elements.
            sinks: ``[Hq]`` float32 if the shape has sinks, else None.

        Raises:
            ValueError: the kernels do not support the strides.
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
