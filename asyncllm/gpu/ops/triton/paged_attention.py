"""PagedAttention: launches of the decode or prefill kernel, and of the merge after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention_plan import TritonPlan
from asyncllm.gpu.ops.triton.attention_tile import score_factors
from asyncllm.gpu.ops.triton.merge_attention import merge_kernel
from asyncllm.gpu.ops.triton.operands import cache_strides, head_strides
from asyncllm.gpu.ops.triton.tuning import Tiles, block_dim_of


class MergeArguments(NamedTuple):
    """Arguments of the merge of partial results.

    Attributes:
        num_partials: number of partial results per query head.
        num_rows: number of rows of ``out`` to merge, from ``first_row`` on.
        seq_lens, splits, first_row, window, max_rows, prefill: see ``merge_kernel``.
    """

    num_partials: int
    num_rows: int
    seq_lens: Tensor
    splits: int
    first_row: int = 0
    window: int | None = None
    max_rows: int = 0
    prefill: bool = False


class RepeatedLaunch:
    """A kernel launch that the layers of a step repeat with other tensors.

    The first call goes through Triton's JIT, which inspects every argument of each launch. Later
    calls launch the compiled kernel that it returned. Triton's interpreter returns no compiled
    kernel, so that every call goes through the JIT.

    Args:
        kernel: kernel whose compile-time constants come last.
        constants: values of all compile-time constants.
        options: Triton's launch options.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], constants: dict[str, Any], **options: int
    ) -> None:
        self._grid = grid
        self._launch_jit = partial(kernel[grid], **constants, **options)
        self._constants = [constants[name] for name in kernel.arg_names if name in constants]
        self._launch_compiled: Callable[..., None] | None = None

    def __call__(self, *arguments: Any, aligned: bool) -> None:
        """Launches the kernel.

        Args:
            aligned: whether all tensors that differ by layer start at a multiple of 16 bytes, as
                the compiled kernel assumes.
        """
        if aligned and self._launch_compiled is not None:
            self._launch_compiled(*arguments, *self._constants)
            return
        compiled = self._launch_jit(*arguments)
        if aligned and compiled is not None:
            self._launch_compiled = compiled[self._grid]


class PagedAttention:
    """An attention kernel, bound to the arguments that all layers of a step share, and its merge.

    Args:
        kernel: ``decode_kernel`` or ``prefill_kernel``.
        block_size: tokens per KV block.
        metadata: the kernel's arguments from ``block_table`` to the last before ``sinks``.
        counts: the kernel's arguments between ``sinks`` and ``score_scale``.
        merge: the merge after the kernel; None if there is only one split.
        constants: constants that only one of the kernels has.
    """

    def __init__(
        self,
        kernel: Any,
        shape: AttentionShape,
        block_size: int,
        tiles: Tiles,
        plan: TritonPlan,
        grid: tuple[int, int, int],
        metadata: tuple[Tensor, ...],
        counts: tuple[int, ...],
        merge: MergeArguments | None,
        **constants: Any,
    ) -> None:
        self._metadata, window = metadata, plan.window
        self._numbers = (*counts, *score_factors(shape.scale, shape.softcap), window or 0)
        sizes = {"HEAD_DIM": shape.head_dim, "KEYS": tiles.keys}
        constants |= sizes | {
            "GROUP": shape.group_size,
            "ROWS": tiles.rows,
            "BLOCK_SIZE": block_size,
            "WINDOW": window is not None,
            "ONE_SPLIT": merge is None,
        }
        self._launch = RepeatedLaunch(
            kernel, grid, constants, num_warps=tiles.warps, num_stages=tiles.stages
        )
        self._merge = merge
        if merge is not None:
            assert plan.workspace is not None
            size, block_dim = merge.num_partials * shape.num_heads, block_dim_of(shape.head_dim)
            workspace = plan.workspace[: size * (block_dim + 2)]
            self._partials = workspace.split([size * block_dim, size, size])
            constants = sizes | {
                "WINDOW": merge.window is not None,
                "MAX_ROWS": merge.max_rows,
                "PREFILL": merge.prefill,
            }
            self._launch_merge = RepeatedLaunch(
                merge_kernel, (merge.num_rows, shape.num_heads, 1), constants, num_warps=4
            )

    def __call__(self, q: Tensor, cache: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Computes attention for the decode rows or the prefill rows of ``q``, and writes ``out``.

        Args:
            q: ``[T, Hq, D]`` with a contiguous last dimension; D is up to 512.
            cache: ``[2, num_blocks, block_size, Hk, D]``, which already contains the rows' own keys
                and values. Strides may be any, but a head spans less than 2**31 elements.
            out: ``[T, Hq, D]``.
            sinks: ``[Hq]`` float32 if the shape has sinks, else None.

        Raises:
            ValueError: the kernels do not support the strides.
        """
        merge, out_strides = self._merge, head_strides("out", out)
        by_layer = (out, q, cache) if sinks is None else (out, q, cache, sinks)
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in by_layer)
        self._launch(
            out,
            *((out, out, out) if merge is None else self._partials),
            q,
            cache,
            *self._metadata,
            sinks,
            *self._numbers,
            *out_strides,
            *head_strides("q", q),
            *cache_strides(cache),
            self._metadata[0].stride(0),
            aligned=aligned,
        )
        if merge is not None:
            numbers = merge.splits, merge.first_row, merge.window or 0
            self._launch_merge(
                out, *self._partials, merge.seq_lens, *numbers, *out_strides, aligned=aligned
            )
