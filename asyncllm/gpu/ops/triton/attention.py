"""TritonAttention: the attention backend on the paged kernels.

Triton itself is imported with the kernels, when the attention is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.ops.backend import CUDA, HALF, AttentionRequest, Constraints
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.toolchain import check_triton
from asyncllm.gpu.ops.triton.tuning import decode_tiles, num_splits, prefill_tiles, workspace_size


@dataclass(slots=True)
class TritonPlan:
    """A step's metadata on the device; decode rows come first.

    Attributes:
        num_decodes: leading rows of one token each, padded ones included.
        seq_lens: ``[R]`` int32, 0 for a padded row.
        block_table: ``[N, W]`` int32.
        table_rows: ``[R]``, the rows' lines of ``block_table``; any number for a padded row.
        splits: programs per decode row and key/value head.
        workspace: float32, for the partials of the splits; shared by all layers.
        query_start_loc: ``[R - num_decodes + 1]`` int32 from 0 on, of the other rows; None if
            there are none.
        window: keys that a query sees, or None.
    """

    num_decodes: int
    seq_lens: Tensor
    block_table: Tensor
    table_rows: Tensor
    splits: int = 1
    workspace: Tensor | None = None
    query_start_loc: Tensor | None = None
    window: int | None = None


class TritonAttention:
    """Paged attention by the Triton kernels, for one CUDA device.

    Args:
        capability: compute capability as ``10 * major + minor``; the device's if None.
        num_sms: multiprocessors; the device's if None.

    Raises:
        EngineError: Triton cannot compile kernels here.
        ValueError: a head size or a GPU that the kernels do not cover.
    """

    name = "triton"
    needs_zeroed_blocks = False
    constraints: ClassVar = Constraints(
        device_types=CUDA,
        min_capability=(8, 0),
        dtypes=HALF | {torch.float32},
        max_head_dim=256,
        block_multiple=16,
        sinks=True,
    )

    @staticmethod
    def default_block_size(device: torch.device) -> int:
        return 16

    @classmethod
    def make(cls, request: AttentionRequest) -> Self:
        attention = cls(request.shape, request.dtype, request.device)
        # A tile of prefill holds a whole group; its rows depend on the GPU, head and dtype.
        group, rows = request.shape.group_size, attention.prefill_tiles.rows
        if group > rows:
            raise InvalidRequestError(
                f'attention_backend="triton" takes at most {rows} query heads per key/value head '
                f"here, and this is {group}; "
                'or attention_backend="torch", which covers it on any device',
                param="attention_backend",
            )
        return attention

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        capability: int | None = None,
        num_sms: int | None = None,
    ) -> None:
        check_triton()
        from asyncllm.gpu.ops.triton.decode_attention import decode_attention
        from asyncllm.gpu.ops.triton.prefill_attention import prefill_attention

        self._decode, self._prefill = decode_attention, prefill_attention
        self.shape = shape
        self.device = device
        self.softcap = shape.softcap
        if capability is None:
            major, minor = torch.cuda.get_device_capability(device)
            capability = 10 * major + minor
        self.num_sms: int = num_sms or (
            torch.cuda.get_device_properties(device).multi_processor_count
        )
        self.decode_tiles = decode_tiles(capability, shape.head_dim, dtype.itemsize)
        self.prefill_tiles = prefill_tiles(capability, shape.head_dim, dtype.itemsize)

    def splits(self, batch: int, max_len: int, window: int | None) -> int:
        """Programs per row and key/value head for a batch of decode rows."""
        if window is not None:
            max_len = min(max_len, window)
        return num_splits(batch, self.shape.num_kv_heads, max_len, self.num_sms)

    def plan(self, inputs: ModelInputs, window: int | None) -> TritonPlan:
        """One copy to the device for the step's lengths and starts; the block tables are there
        already."""
        rows, decodes = inputs.num_rows, inputs.num_decodes
        starts = inputs.query_start_loc[decodes:] - decodes
        packed = np.concatenate((inputs.seq_lens, starts)).astype(np.int32)
        seq_lens, query_start_loc = copy_to_device(packed, self.device).split((rows, len(starts)))
        max_len = int(inputs.seq_lens[:decodes].max(initial=0))
        assert inputs.device_table is not None
        plan = self._plan(
            decodes, seq_lens, inputs.device_table, inputs.req_indices, max_len, window
        )
        plan.query_start_loc = query_start_loc if decodes < rows else None
        return plan

    def plan_decode(self, rows: DecodeInputs, window: int | None) -> TritonPlan:
        return self._plan(
            rows.num_rows, rows.seq_lens, rows.block_table, rows.req_indices, rows.max_len, window
        )

    def _plan(
        self,
        decodes: int,
        seq_lens: Tensor,
        block_table: Tensor,
        table_rows: Tensor,
        max_len: int,
        window: int | None,
    ) -> TritonPlan:
        splits = self.splits(decodes, max_len, window) if decodes else 1
        size = workspace_size(decodes, self.shape.num_heads, self.shape.head_dim, splits)
        workspace = torch.empty(size, dtype=torch.float32, device=self.device) if size else None
        return TritonPlan(
            decodes, seq_lens, block_table, table_rows, splits, workspace, window=window
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        plan: TritonPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of ``q [T, Hq, D]``; ``k`` and ``v`` are read from the cache."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = plan.num_decodes
        scores: dict[str, Any] = {
            "scale": self.shape.scale,
            "softcap": self.softcap,
            "window": plan.window,
            "sinks": None if sinks is None else sinks.float(),
        }
        if decodes:
            self._decode(
                q[:decodes],
                cache,
                plan.block_table,
                plan.table_rows[:decodes],
                plan.seq_lens[:decodes],
                tiles=self.decode_tiles,
                splits=plan.splits,
                workspace=plan.workspace,
                out=out[:decodes],
                **scores,
            )
        if plan.query_start_loc is not None:
            self._prefill(
                q[decodes:],
                cache,
                plan.block_table,
                plan.table_rows[decodes:],
                plan.seq_lens[decodes:],
                plan.query_start_loc,
                tiles=self.prefill_tiles,
                out=out[decodes:],
                **scores,
            )
        return out.view(q.shape[0], -1)
