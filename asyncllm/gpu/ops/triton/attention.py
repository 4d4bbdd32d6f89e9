"""TritonAttention: the attention backend on the Triton kernels.

The kernels, and Triton with them, are imported when the attention is made.
"""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.backend import (
    CUDA_DEVICE_TYPES,
    HALF_DTYPES,
    AttentionRequest,
    Constraints,
)
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton import tuning
from asyncllm.gpu.ops.triton.attention_plan import TritonPlan
from asyncllm.gpu.ops.triton.toolchain import check_triton


class TritonAttention:
    """Paged attention by the Triton kernels, for one CUDA device.

    Args:
        capability: compute capability as ``10 * major + minor``; None is the device's.
        num_sms: number of multiprocessors; None is the device's.

    Raises:
        EngineError: Triton cannot compile kernels here.
        ValueError: the kernels do not support the head size or the GPU.
    """

    name = "triton"
    needs_zeroed_blocks = False
    constraints: ClassVar = Constraints(
        device_types=CUDA_DEVICE_TYPES,
        min_capability=(8, 0),
        dtypes=HALF_DTYPES | {torch.float32},
        max_head_dim=tuning.MAX_HEAD_DIM,
        block_multiple=16,
        sinks=True,
    )

    @staticmethod
    def default_block_size(device: torch.device) -> int:
        return 16

    @classmethod
    def make(cls, request: AttentionRequest) -> Self:
        attention = cls(request.shape, request.dtype, request.device)
        # A prefill tile holds all query heads of one key/value head.
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
        from asyncllm.gpu.ops.triton.decode_attention import DecodeAttention
        from asyncllm.gpu.ops.triton.prefill_attention import PrefillAttention

        self._decode, self._prefill = DecodeAttention, PrefillAttention
        self.shape = shape
        self.device = device
        if capability is None:
            major, minor = torch.cuda.get_device_capability(device)
            capability = 10 * major + minor
        self.num_sms: int = num_sms or (
            torch.cuda.get_device_properties(device).multi_processor_count
        )
        self.programs_per_sm = tuning.decode_programs_per_sm(capability, shape.head_dim)
        self.decode_tiles = tuning.decode_tiles(capability, shape.head_dim, dtype.itemsize)
        self.prefill_tiles = tuning.prefill_tiles(capability, shape.head_dim, dtype.itemsize)

    def num_splits(self, batch: int, max_len: int, window: int | None) -> int:
        """Chooses the number of splits per row for a batch of decode rows."""
        if window is not None:
            max_len = min(max_len, window)
        return tuning.num_splits(
            batch, self.shape.num_kv_heads, max_len, self.num_sms, self.programs_per_sm
        )

    def may_have_skewed_lengths(self, max_len: int, window: int | None) -> bool:
        """Whether decode rows of at most ``max_len`` tokens may need balanced splits.

        With a window they never do: all rows then see about the same number of keys.
        """
        return window is None and max_len > tuning.SKEW_MARGIN_TOKENS

    def has_skewed_lengths(
        self, batch: int, lengths: np.ndarray, max_len: int, window: int | None
    ) -> bool:
        """Whether the longest row would delay the batch if all rows had equally many splits.

        Args:
            batch: number of rows of the launch, padding included.
            lengths: ``[B]``, tokens of each sequence.
            max_len: sequence length for which the number of splits is chosen.
        """
        longest = int(lengths.max())
        if not self.may_have_skewed_lengths(longest, window):
            return False
        splits, kv_heads = self.num_splits(batch, max_len, None), self.shape.num_kv_heads
        num_programs = self.programs_per_sm * self.num_sms
        total = int(lengths.sum())
        return tuning.has_skewed_lengths(longest, total, splits, kv_heads, num_programs)

    def plan(self, step: StepInputs, window: int | None, group: int) -> TritonPlan:
        rows, decodes = step.num_rows, step.num_decodes
        plan = TritonPlan(
            decodes, step.seq_lens, step.groups[group].block_table, step.req_indices, window=window
        )
        host, num_partials = step.host, 0
        if decodes:
            max_len, balanced = step.max_len, step.has_balanced_splits and window is None
            if host is not None:
                lengths = host.seq_lens[:decodes]
                max_len = int(lengths.max())
                balanced = self.has_skewed_lengths(decodes, lengths, max_len, window)
            num_partials = self._plan_decode_rows(plan, max_len, balanced)
        if decodes < rows:
            # A captured step has only decode rows, and no lengths on the host.
            assert host is not None
            plan.query_start_loc = step.prefill_start_loc
            tokens = int(host.query_start_loc[rows]) - decodes
            max_len = int(host.seq_lens[decodes:].max())
            num_partials = max(
                num_partials, self._plan_prefill_tiles(plan, tokens, rows - decodes, max_len)
            )
        if num_partials:
            size = tuning.workspace_elements(
                num_partials, self.shape.num_heads, self.shape.head_dim
            )
            plan.workspace = torch.empty(size, dtype=torch.float32, device=self.device)
        return plan

    def _plan_decode_rows(self, plan: TritonPlan, max_len: int, balanced: bool) -> int:
        """Chooses the splits of decode rows; returns the number of partial results per head."""
        batch = plan.num_decodes
        if balanced:
            plan.extra_splits = tuning.num_extra_splits(
                self.shape.num_kv_heads, self.num_sms, self.programs_per_sm
            )
            return batch + plan.extra_splits
        plan.splits = self.num_splits(batch, max_len, plan.window)
        return batch * plan.splits if plan.splits > 1 else 0

    def _plan_prefill_tiles(self, plan: TritonPlan, tokens: int, seqs: int, max_len: int) -> int:
        """Chooses the splits of prefill tiles; returns the number of partial results per head."""
        shape, tiles = self.shape, self.prefill_tiles
        if plan.window is not None:
            max_len = min(max_len, plan.window + tiles.rows)
        count = tuning.num_tiles(tokens, seqs, shape.group_size, tiles)
        splits = tuning.num_tile_splits(count, shape.num_kv_heads, max_len, self.num_sms)
        plan.tile_splits = splits
        return tokens * splits if splits > 1 else 0

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
        if not plan.kernels:
            # Bind the kernels to the arguments that all layers of a step share.
            sizes, count = (self.shape, cache.shape[2]), q.shape[0] - plan.num_decodes
            if plan.num_decodes:
                plan.kernels.append(self._decode(*sizes, self.decode_tiles, plan))
            if plan.query_start_loc is not None:
                plan.kernels.append(self._prefill(*sizes, self.prefill_tiles, plan, count))
        for kernel in plan.kernels:
            kernel(q, cache, out, sinks)
        return out.view(q.shape[0], -1)
