"""TritonPlan: the plan of a step's paged attention, without an import of Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class TritonPlan:
    """The plan of a step, with metadata on the device; decode rows come first.

    Attributes:
        num_decodes: number of leading rows of one token each, padded rows included.
        seq_lens: ``[R]`` int32 or int64, tokens of each sequence up to its last query; 0 for a
            padded row, whose output is zero.
        block_table: ``[N, W]`` int32, rows contiguous; entries beyond a sequence are never read.
        table_rows: ``[R]``, index of each row's block table in ``block_table``; any number for a
            padded row.
        splits: number of splits of each decode row's keys, from ``num_splits``; 1 if
            ``extra_splits`` is not 0.
        extra_splits: if not 0, splits of decode rows are balanced: all are equally long, a row has
            as many as its length needs, and there are at most ``num_decodes + extra_splits``. Not
            possible with a window.
        tile_splits: number of splits of the keys of each prefill tile, from ``num_tile_splits``.
        workspace: float32, at least ``workspace_elements`` elements for the partial results of the
            splits; all layers use the same. None if no keys are split.
        query_start_loc: ``[R - num_decodes + 1]`` int32 or int64, cumulative sums of the prefill
            rows' query tokens, from 0 on; None if there are no prefill rows. Rows may be empty.
            Tokens from the last entry on are padding.
        window: number of keys that a query sees, its own included; None is all.
        kernels: the kernels of decode rows and of prefill rows, if the step has such rows; the
            step's first layer binds them to the arguments that all layers share.
    """

    num_decodes: int
    seq_lens: Tensor
    block_table: Tensor
    table_rows: Tensor
    splits: int = 1
    extra_splits: int = 0
    tile_splits: int = 1
    workspace: Tensor | None = None
    query_start_loc: Tensor | None = None
    window: int | None = None
    kernels: list[Callable[..., None]] = field(default_factory=list)
