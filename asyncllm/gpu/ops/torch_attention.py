"""TorchAttention: paged attention in plain torch.

The rows of a step are put into groups of similar shape. The keys and values of each group are
gathered from the cache into one padded batch for scaled_dot_product_attention. One batch for all
rows would be padded to the longest row; one batch per row would cost a handful of torch calls per
row and layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.gpu.batch.step_inputs import KVGroupInputs, RowArrays, StepInputs
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.ops.backend import AttentionRequest, Constraints
from asyncllm.gpu.ops.base import AttentionShape

ROW_GROUP_OVERHEAD_TOKENS = 256
"""Overhead of one more group per layer, in KV tokens that could be gathered in that time."""

MAX_ROW_BATCH_KV_BYTES = 8 * 2**20
"""Maximum bytes of gathered K and V of rows that are computed together. A row that takes more is
computed alone."""

MAX_PADDED_QUERY_KEY_PAIRS = 1 << 16
"""Maximum number of query-key pairs per head in a group of several prefill rows."""


@dataclass(slots=True)
class PaddedRowGroup:
    """Rows of a step that are computed in one padded batch.

    Attributes:
        num_rows, num_queries: number of rows, and of queries per row, padding included.
        tokens: the step's tokens in the group, as a slice, or as an index that includes padding.
        blocks: ids of the blocks to gather, the same number per row; None if the step's own keys
            and values are all that the queries see, so that a causal mask suffices.
        length: number of keys per row, padding included.
        mask: added to the scores, ``[num_rows, 1, num_queries, length]``, or None.
        outputs: if ``tokens`` includes padding, the positions of its real entries, and the tokens
            at these positions; else None.
    """

    num_rows: int
    num_queries: int
    tokens: slice | Tensor
    blocks: Tensor | None
    length: int
    mask: Tensor | None
    outputs: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class CapturablePlan:
    """Plan of decode rows for a CUDA graph: only the device knows their lengths.

    Attributes:
        blocks: ``[B, W]`` int64, the rows' whole block tables.
        masked_keys: ``[B, W * block_size]`` bool, True for keys that a row does not see.
    """

    blocks: Tensor
    masked_keys: Tensor


class TorchAttention:
    """Attention on any of torch's devices; the reference for all other backends."""

    name = "torch"
    needs_zeroed_blocks = True
    constraints: ClassVar = Constraints(sinks=True)

    @staticmethod
    def default_block_size(device: torch.device) -> int:
        return 32 if device.type == "cpu" else 16

    @classmethod
    def make(cls, request: AttentionRequest) -> Self:
        return cls(request.shape, request.dtype)

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.token_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        self._workspace: Tensor | None = None

    def plan(
        self, step: StepInputs, window: int | None, group: int
    ) -> list[PaddedRowGroup] | CapturablePlan:
        if step.host is None:
            return self._make_capturable_plan(step, window, group)
        rows, block_size = step.host, step.groups[group].block_size
        first_keys = np.zeros_like(rows.starts)
        if window is not None:
            first_keys = np.maximum(rows.starts - window + 1, 0) // block_size * block_size
        lengths = rows.seq_lens - first_keys
        return [
            self._plan_group(step, members, first_keys[members], lengths[members], window, group)
            for members in self._group_rows(step, rows, lengths, block_size)
        ]

    def _make_capturable_plan(
        self, step: StepInputs, window: int | None, group: int
    ) -> CapturablePlan:
        """Plans decode rows of unknown length, each of which gathers its whole block table.

        Each row thus costs as much as the longest possible sequence.
        """
        blocks = step.row_block_tables(group).long()
        keys = torch.arange(blocks.shape[1] * step.groups[group].block_size, device=blocks.device)
        ends = step.seq_lens.long().unsqueeze(1)
        masked_keys = keys >= ends
        if window is not None:
            masked_keys = masked_keys | (keys < ends - window)
        return CapturablePlan(blocks, masked_keys)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        plan: list[PaddedRowGroup] | CapturablePlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(plan, CapturablePlan):
            return self._attend_full_block_tables(q, cache, plan, sinks)
        if len(plan) == 1 and isinstance(plan[0].tokens, slice):
            return self._attend(q, k, v, cache, plan[0], sinks).reshape(q.shape[0], -1)
        out = q.new_empty(q.shape)
        for group in plan:
            result = self._attend(q, k, v, cache, group, sinks)
            if isinstance(group.tokens, slice):
                out[group.tokens] = result
            else:
                valid, target = group.outputs or (slice(None), group.tokens)
                out.index_copy_(0, target, result[valid])
        return out.view(q.shape[0], -1)

    def _attend_full_block_tables(
        self, q: Tensor, cache: Tensor, plan: CapturablePlan, sinks: Tensor | None
    ) -> Tensor:
        """Attention of decode rows over their whole block tables.

        Keys and values that a row must not see are replaced: they may be NaN, and NaN times a
        weight of zero is NaN.
        """
        rows = plan.blocks.shape[0]
        gathered = cache.index_select(1, plan.blocks.view(-1)).view(2, rows, -1, *cache.shape[3:])
        gathered = gathered.masked_fill(plan.masked_keys[None, :, :, None, None], 0.0)
        k, v = gathered.transpose(2, 3)
        # Let a padded row, whose sequence is empty, see all keys: a softmax over no key is NaN.
        masked = plan.masked_keys & ~plan.masked_keys.all(-1, keepdim=True)
        mask = torch.where(masked, -torch.inf, 0.0).to(q.dtype)[:, None, None]
        return self._attend_to_keys(q, k, v, mask, sinks).reshape(rows, -1)

    @property
    def _has_plain_softmax(self) -> bool:
        """Whether torch's scaled_dot_product_attention suffices: without softcap and sinks."""
        return self.shape.softcap is None and not self.shape.sinks

    def _group_rows(
        self, step: StepInputs, host: RowArrays, lengths: np.ndarray, block: int
    ) -> list[np.ndarray]:
        """Divides the rows into groups; returns the row indices of each group, ascending."""
        decodes, rows = step.num_decodes, len(host.starts)
        counts = np.diff(host.query_start_loc)
        groups = []
        if decodes:
            padded = -(-lengths[:decodes] // block) * block
            groups += split_by_length(padded, MAX_ROW_BATCH_KV_BYTES // self.token_bytes)
        joined: list[list[int]] = []
        for row in sorted(range(decodes, rows), key=lambda row: (counts[row], lengths[row])):
            if joined and _may_join_group(counts, lengths, joined[-1], row):
                joined[-1].append(row)
            else:
                joined.append([row])
        return groups + [np.array(sorted(each)) for each in joined]

    def _plan_group(
        self, step: StepInputs, rows: np.ndarray, first_keys: np.ndarray, lengths: np.ndarray,
        window: int | None, group: int,
    ) -> PaddedRowGroup:  # fmt: skip
        """Plans the group of ``rows``; the i-th row reads keys from ``first_keys[i]`` on."""
        host, device = step.host, step.token_ids.device
        assert host is not None
        first_tokens, starts = host.query_start_loc[rows], host.starts[rows]
        counts = host.query_start_loc[rows + 1] - first_tokens
        num_rows, num_queries, length = len(counts), int(counts.max()), int(lengths.max())
        tokens, outputs = _token_index(first_tokens, counts, device)
        whole = num_rows == 1 and starts[0] == 0
        if whole and (window is None or length <= window):
            return PaddedRowGroup(1, num_queries, tokens, None, length, None, None)
        block_ids = _padded_block_ids(
            step.groups[group], host.req_indices[rows], first_keys, lengths
        )
        blocks, mask = copy_to_device(block_ids, device), None
        if num_rows > 1 or num_queries > 1 or window is not None:
            mask = _make_mask(starts - first_keys, lengths, num_queries, window)
            mask = copy_to_device(mask, device).unsqueeze(1).to(self.dtype)
        return PaddedRowGroup(num_rows, num_queries, tokens, blocks, length, mask, outputs)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        group: PaddedRowGroup,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of a PaddedRowGroup: ``[tokens of the group, Hq, D]``, padding included."""
        shape, queries = self.shape, group.num_queries
        if group.blocks is None:
            q, k, v = (x[group.tokens].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            if self._has_plain_softmax:
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=shape.scale, enable_gqa=True
                )
            else:
                causal = torch.full((queries, queries), -torch.inf, device=q.device).triu_(1)
                out = eager_attention(q, k, v, causal, shape, sinks)
            return out.squeeze(0).transpose(0, 1)
        gathered = self._gather_blocks(cache, group.blocks)
        gathered = gathered.view(2, group.num_rows, -1, *cache.shape[3:])
        k, v = gathered[:, :, : group.length].transpose(2, 3)
        return self._attend_to_keys(q[group.tokens], k, v, group.mask, sinks)

    def _attend_to_keys(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of ``q [rows * queries, Hq, D]`` to ``k`` and ``v [rows, Hk, keys, D]``.

        The result has the shape of ``q``.
        """
        shape, rows = self.shape, len(k)
        if len(q) == rows and self._has_plain_softmax:
            grouped = q.reshape(rows, shape.num_kv_heads, shape.group_size, shape.head_dim)
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=shape.scale)
            return out.reshape(q.shape)
        heads = q.view(rows, -1, shape.num_heads, shape.head_dim).transpose(1, 2)
        if self._has_plain_softmax:
            out = F.scaled_dot_product_attention(
                heads, k, v, attn_mask=mask, scale=shape.scale, enable_gqa=True
            )
        else:
            out = eager_attention(heads, k, v, mask, shape, sinks)
        return out.transpose(1, 2).reshape(q.shape)

    def _gather_blocks(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """Gathers blocks of ``cache`` into a buffer that all layers and steps reuse.

        The operating system would map newly allocated memory of this size, page by page, in every
        layer.
        """
        shape = (2, len(blocks), *cache.shape[2:])
        size = math.prod(shape)
        if self._workspace is None or self._workspace.numel() < size:
            self._workspace = cache.new_empty(size)
        target = self._workspace[:size].view(shape)
        return torch.index_select(cache, 1, blocks, out=target)


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    shape: AttentionShape,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a soft cap or sinks; scores and softmax are in float32.

    Args:
        q: ``[rows, Hq, queries, D]``.
        k, v: ``[rows, Hk, keys, D]``.
        mask: added to the scores, ``[..., queries, keys]``.
        sinks: ``[Hq]``, an extra logit in the softmax of every query of the head.
    """
    rows, heads, queries, size = q.shape
    grouped = q.reshape(rows, shape.num_kv_heads, shape.group_size * queries, size)
    scores = torch.matmul(grouped, k.transpose(2, 3)).float().mul_(shape.scale)
    scores = scores.view(rows, heads, queries, -1)
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float().view(1, heads, 1, 1).expand(rows, heads, queries, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.to(v.dtype).reshape(rows, shape.num_kv_heads, shape.group_size * queries, -1)
    return torch.matmul(weights, v).view(rows, heads, queries, size)


def split_by_length(lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Divides rows into groups that are padded to their longest member.

    Rows are taken from the longest on. A row joins the current group while the group's padding
    costs no more than another group would, and the padded group has at most ``max_tokens``.

    Args:
        lengths: ``[R]``, number of tokens to gather per row.

    Returns:
        Row indices of each group, ascending.
    """
    order = np.argsort(-lengths, kind="stable")
    if int(lengths.max()) * len(lengths) - int(lengths.sum()) <= ROW_GROUP_OVERHEAD_TOKENS and (
        int(lengths.max()) * len(lengths) <= max_tokens
    ):
        return [np.arange(len(lengths))]
    groups: list[np.ndarray] = []
    start, padding = 0, 0
    for index in range(1, len(order) + 1):
        if index < len(order):
            longest = int(lengths[order[start]])
            padding += longest - int(lengths[order[index]])
            if padding <= ROW_GROUP_OVERHEAD_TOKENS and (index + 1 - start) * longest <= max_tokens:
                continue
        groups.append(np.sort(order[start:index]))
        start, padding = index, 0
    return groups


def _may_join_group(
    query_counts: np.ndarray, key_counts: np.ndarray, group_rows: list[int], row: int
) -> bool:
    """Whether a prefill row may be computed in one padded batch with the rows ``group_rows``."""
    members = [*group_rows, row]
    padded = len(members) * int(query_counts[members].max()) * int(key_counts[members].max())
    exact = int((query_counts[members] * key_counts[members]).sum())
    return padded <= MAX_PADDED_QUERY_KEY_PAIRS and padded <= 2 * exact + 1024


def _token_index(
    first_tokens: np.ndarray, counts: np.ndarray, device: torch.device
) -> tuple[slice | Tensor, tuple[Tensor, Tensor] | None]:
    """Computes ``tokens`` and ``outputs`` of a PaddedRowGroup.

    ``tokens`` is a slice where the tokens are adjacent and every row has equally many.
    """
    longest = int(counts.max())
    even = int(counts.min()) == longest
    if even and np.array_equal(first_tokens, first_tokens[0] + np.arange(len(counts)) * longest):
        return slice(int(first_tokens[0]), int(first_tokens[-1]) + longest), None
    offsets = np.arange(longest)
    index = (first_tokens[:, None] + np.minimum(offsets, counts[:, None] - 1)).reshape(-1)
    tokens = copy_to_device(index, device)
    if even:
        return tokens, None
    valid = np.flatnonzero((offsets < counts[:, None]).reshape(-1))
    return tokens, (copy_to_device(valid, device), copy_to_device(index[valid], device))


def _make_mask(
    offsets: np.ndarray, lengths: np.ndarray, num_queries: int, window: int | None
) -> np.ndarray:
    """Makes a mask ``[rows, num_queries, keys]``: 0 for visible keys, else minus infinity.

    Args:
        offsets: ``[rows]``, position of each row's first query, counted from its first key.
    """
    queries = offsets[:, None] + np.arange(num_queries)
    # Padding queries see the keys of the last real query: a softmax over no key is NaN.
    queries = np.minimum(queries, (lengths - 1)[:, None])[:, :, None]
    keys = np.arange(int(lengths.max()))
    masked_keys = keys > queries
    if window is not None:
        masked_keys |= keys <= queries - window
    return np.where(masked_keys, np.float32(-math.inf), np.float32(0.0))


def _padded_block_ids(
    group: KVGroupInputs, req_indices: np.ndarray, first_keys: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Ids of each row's blocks from its first key on, padded with the null block."""
    block, table = group.block_size, group.host_table
    columns = np.arange(-(-int(lengths.max()) // block))
    used = columns < -(-lengths[:, None] // block)
    columns = np.minimum(columns + (first_keys // block)[:, None], table.shape[1] - 1)
    blocks = np.where(used, table[req_indices[:, None], columns], 0)
    return blocks.reshape(-1).astype(np.int64)
