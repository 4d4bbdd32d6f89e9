"""FlashAttention: base class of the backends on Dao's FlashAttention libraries.

The step's keys and values are in the paged cache already, so that FlashAttention 2 and 3 only read
it. Decode rows go through ``flash_attn_with_kvcache`` with one query each. Other rows are passed as
causal sequences of different lengths.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.errors import EngineError
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.attention_check import check_attention_outputs
from asyncllm.gpu.ops.backend import CUDA_DEVICE_TYPES, HALF_DTYPES, AttentionRequest, Constraints
from asyncllm.gpu.ops.base import AttentionShape

AttentionFunction = Callable[..., Tensor]
"""Function of a FlashAttention library. Its arguments are untyped, because the libraries declare no
types."""


@dataclass(slots=True)
class PrefillRows:
    """The P prefill rows of a step, with metadata on the device.

    Attributes:
        seq_lens: ``[P]`` int32, tokens of each sequence up to its last query.
        block_table: ``[P, W]`` int32.
        query_starts: ``[P + 1]`` int32, cumulative sums of the rows' query tokens, from 0 on.
        key_starts: ``[P + 1]`` int32, cumulative sums of ``seq_lens``, from 0 on.
        max_queries, max_keys: largest numbers of query tokens and of keys of a row.
    """

    seq_lens: Tensor
    block_table: Tensor
    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int


@dataclass(slots=True)
class FlashPlan:
    """The plan of a step; decode rows come first.

    Attributes:
        num_decodes: number of leading rows of one token each, padded rows included.
        seq_lens: ``[num_decodes]`` int32, 0 for a padded row.
        block_table: ``[num_decodes, W]`` int32.
        prefill: the prefill rows, or None if the step has none.
        window: numbers of keys that a query sees before and after its own position; -1 is all.
    """

    num_decodes: int
    seq_lens: Tensor
    block_table: Tensor
    prefill: PrefillRows | None
    window: tuple[int, int]


class FlashAttention(ABC):
    """Attention that calls the library once for decode rows and once for prefill rows.

    With ``num_splits=0`` the library chooses how many programs a row's keys are split among. The
    choice depends on the number of rows and the width of the block table, which are both fixed in a
    captured decode step.
    """

    name: str
    needs_zeroed_blocks: bool
    table_argument: ClassVar[str]
    constraints: ClassVar = Constraints(
        device_types=CUDA_DEVICE_TYPES,
        min_capability=(8, 0),
        dtypes=HALF_DTYPES,
        max_head_dim=256,
        head_dim_multiple=8,
    )
    block_size: ClassVar[int]
    _attend_with_kv_cache: AttentionFunction
    _attend_varlen: AttentionFunction

    @classmethod
    def default_block_size(cls, device: torch.device) -> int:
        return cls.block_size

    @classmethod
    def make(cls, request: AttentionRequest) -> Self:
        """Makes the attention, and compares it with plain torch on small steps.

        The check is needed because some versions of the libraries give wrong results for rows in a
        paged cache.

        Raises:
            EngineError: the library is missing, too old, or gives wrong results.
        """
        attention = cls(request.shape)
        check_attention_outputs(attention, request)
        return attention

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.softcap = shape.softcap or 0.0

    def plan(self, step: StepInputs, window: int | None, group: int) -> FlashPlan:
        """Plans a step, with block tables gathered on the device.

        ``row_block_tables`` cuts the tables to the longest row of an eager step, because the
        libraries infer the length of the longest sequence from the width of the table.
        """
        decodes, blocks = step.num_decodes, step.row_block_tables(group)
        prefill = None
        if decodes < step.num_rows:
            # A captured step has only decode rows, and no lengths on the host.
            assert step.host is not None
            seq_lens = step.seq_lens[decodes:]
            prefill = PrefillRows(
                seq_lens=seq_lens,
                block_table=blocks[decodes:],
                query_starts=step.prefill_start_loc,
                key_starts=F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
                max_queries=int(np.diff(step.host.query_start_loc[decodes:]).max()),
                max_keys=int(step.host.seq_lens[decodes:].max()),
            )
        return FlashPlan(
            decodes, step.seq_lens[:decodes], blocks[:decodes], prefill, _window_size(window)
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: FlashPlan) -> Tensor:
        """Attention of ``q [T, Hq, D]``; ``k`` and ``v`` are read from the cache."""
        decodes = plan.num_decodes
        if plan.prefill is None:
            return self._attend_decode_rows(q, cache, plan).reshape(q.shape[0], -1)
        if not decodes:
            return self._attend_prefill_rows(q, cache, plan.prefill, plan.window).reshape(
                q.shape[0], -1
            )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[:decodes] = self._attend_decode_rows(q[:decodes], cache, plan)
        out[decodes:] = self._attend_prefill_rows(q[decodes:], cache, plan.prefill, plan.window)
        return out.view(q.shape[0], -1)

    def _attend_decode_rows(self, q: Tensor, cache: Tensor, plan: FlashPlan) -> Tensor:
        """Attention output of the decode rows, in the shape of ``q [num_decodes, Hq, D]``.

        The result of a padded row is finite.
        """
        out = self._attend_with_kv_cache(
            q.unsqueeze(1),
            cache[0],
            cache[1],
            cache_seqlens=plan.seq_lens,
            num_splits=0,
            **{self.table_argument: plan.block_table},
            **self.call_options(plan.window),
        )
        return out.squeeze(1)

    def _attend_prefill_rows(
        self, q: Tensor, cache: Tensor, rows: PrefillRows, window: tuple[int, int]
    ) -> Tensor:
        """Attention output of the prefill rows, in the shape of ``q [tokens, Hq, D]``."""
        return self._attend_varlen(
            q,
            cache[0],
            cache[1],
            cu_seqlens_q=rows.query_starts,
            max_seqlen_q=rows.max_queries,
            **{self.table_argument: rows.block_table},
            **self.prefill_options(rows),
            **self.call_options(window),
        )

    @abstractmethod
    def prefill_options(self, rows: PrefillRows) -> dict[str, Any]:
        """Keyword arguments for prefill rows, which differ between FlashAttention 2 and 3."""

    def call_options(self, window: tuple[int, int]) -> dict[str, Any]:
        """Keyword arguments of every call, alike in FlashAttention 2 and 3."""
        return {
            "softmax_scale": self.shape.scale,
            "causal": True,
            "window_size": window,
            "softcap": self.softcap,
        }


def import_library(backend: str, module: str, remedy: str) -> ModuleType:
    """Imports a FlashAttention library.

    Args:
        backend: name of the attention backend, for the error.
        remedy: how to install the library.

    Raises:
        EngineError: the library cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise EngineError(
            f'attention_backend="{backend}": {module} cannot be imported ({error}): {remedy}, or '
            'choose attention_backend="auto"'
        ) from error


def _window_size(window: int | None) -> tuple[int, int]:
    """The libraries' ``window_size``: keys before and after a query, its own excluded."""
    return (-1, -1) if window is None else (window - 1, 0)
