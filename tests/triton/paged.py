"""A paged KV cache full of traps, and float64 attention over what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention_plan import TritonPlan
from asyncllm.gpu.ops.triton.tuning import Tiles, workspace_elements

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class AttentionCase:
    """Rows of ``counts`` queries each, the last of ``lengths`` tokens.

    Attributes:
        splits, extra_splits: programs, see ``DecodeAttention`` and ``PrefillAttention``.
        layout: order of the cache's dimensions in memory.
        padded_tokens: tokens past the last row.
    """

    name: str
    group: int
    head_dim: int
    lengths: tuple[int, ...]
    counts: tuple[int, ...] = ()
    kv_heads: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    splits: int = 1
    extra_splits: int = 0
    softcap: float | None = None
    window: int | None = None
    layout: str = "layers"
    padded_tokens: int = 0
    sinks: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        return self.name


@dataclass
class PagedBatch:
    """Queries, cache and tables of a case; ``keys`` and ``values`` are what each row holds."""

    q: Tensor
    cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    sinks: Tensor | None = None


def make_cache(
    layout: str, blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """``[2, blocks, block_size, heads, dim]`` in some order in memory, all NaN."""
    if layout == "layers":
        cache = torch.empty(2, blocks, block_size, heads, dim, dtype=dtype)
    elif layout == "blocks":
        cache = torch.empty(blocks, 3, 2, block_size, heads, dim, dtype=dtype)[:, 1].transpose(0, 1)
    elif layout == "heads":
        cache = torch.empty(2, blocks, heads, block_size, dim, dtype=dtype).transpose(2, 3)
    else:
        cache = torch.empty(2, blocks, heads, dim, block_size, dtype=dtype).permute(0, 1, 4, 2, 3)
    return cache.fill_(torch.nan)


def make_batch(case: AttentionCase, device: str, seed: int = 0) -> PagedBatch:
    """Every block that no row owns, the null block and the rest of each last block are NaN;
    unused entries of a block table name such blocks. Blocks before the window of a row's first
    query have been given back: the table has the null block there."""
    random = torch.Generator().manual_seed(seed)
    size = case.block_size
    owned = [-(-length // size) for length in case.lengths]
    width = max(owned) + 2
    blocks = sum(owned) + 4
    shape = (case.kv_heads, case.head_dim)
    cache = make_cache(case.layout, blocks, size, *shape, case.dtype)
    order = (torch.randperm(blocks - 1, generator=random) + 1).tolist()
    block_table = torch.full((len(owned), width), order.pop(), dtype=torch.int32)
    keys, values = [], []
    counts = case.counts or tuple(1 for _ in case.lengths)
    for row, length in enumerate(case.lengths):
        mine = [order.pop() for _ in range(owned[row])]
        first_seen = 0 if case.window is None else max(0, length - counts[row] - case.window + 1)
        trimmed = first_seen // size
        block_table[row, : len(mine)] = torch.tensor([0] * trimmed + mine[trimmed:])
        pair = torch.randn(2, length, *shape, generator=random).to(case.dtype)
        for position in range(trimmed * size, length):
            cache[:, mine[position // size], position % size] = pair[:, position]
        keys.append(pair[0])
        values.append(pair[1])
    tokens = sum(counts) + case.padded_tokens
    # Queries are a slice of a wider projection, as they are in the model.
    merged = torch.randn(tokens, case.kv_heads * (case.group + 2), case.head_dim, generator=random)
    q = merged.to(case.dtype)[:, : case.kv_heads * case.group]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    return PagedBatch(
        q=q.to(device),
        cache=_strided_to(cache, device),
        block_table=block_table.to(device),
        seq_lens=torch.tensor(case.lengths, dtype=torch.int32, device=device),
        query_start_loc=starts.to(device),
        keys=keys,
        values=values,
        sinks=torch.randn(q.shape[1], generator=random).to(device) * 2 if case.sinks else None,
    )


def _strided_to(cache: Tensor, device: str) -> Tensor:
    """A copy on the device with the same strides."""
    if device == "cpu":
        return cache
    there = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=device)
    return there.copy_(cache)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Float64 attention of the last queries of one sequence.

    Args:
        q: ``[n, Hq, D]``; query i is at position ``len(k) - n + i``.
        k, v: ``[length, Hk, D]``.
        sinks: ``[Hq]``, logits without values.
    """
    count, length = len(q), len(k)
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(length - count, length).unsqueeze(1)
    seen = torch.arange(length)
    hidden = seen > positions
    if window is not None:
        hidden |= seen <= positions - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.cpu().double().view(-1, 1, 1).expand(-1, count, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v)


def attend_decodes(
    module: ModuleType, q: Tensor, cache: Tensor, block_table: Tensor, table_rows: Tensor,
    seq_lens: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None,
    out: Tensor | None = None, splits: int = 1, extra_splits: int = 0, window: int | None = None,
    tiles: Tiles,
) -> Tensor:  # fmt: skip
    """``DecodeAttention`` of a module, on one token per row."""
    shape = AttentionShape(*q.shape[1:2], *cache.shape[3:], scale, softcap, sinks is not None)
    count = len(seq_lens) + extra_splits if extra_splits else len(seq_lens) * splits
    plan = TritonPlan(
        len(seq_lens), seq_lens, block_table, table_rows, splits, extra_splits,
        workspace=_workspace(q, count), window=window,
    )  # fmt: skip
    attention = module.DecodeAttention(shape, cache.shape[2], tiles, plan)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    attention(q, cache, out, sinks)
    return out


def attend_prefills(
    module: ModuleType, q: Tensor, cache: Tensor, block_table: Tensor, table_rows: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor, *, scale: float, tiles: Tiles,
    softcap: float | None = None, sinks: Tensor | None = None, out: Tensor | None = None,
    first_row: int = 0, splits: int = 1, window: int | None = None,
) -> Tensor:  # fmt: skip
    """``PrefillAttention`` of a module, after ``first_row`` decode rows that nothing computes."""
    shape = AttentionShape(*q.shape[1:2], *cache.shape[3:], scale, softcap, sinks is not None)
    tokens = len(q) - first_row
    table_rows, seq_lens = (
        torch.cat((rows.new_zeros(first_row), rows)) if first_row else rows
        for rows in (table_rows, seq_lens)
    )
    plan = TritonPlan(
        first_row, seq_lens, block_table, table_rows, tile_splits=splits,
        workspace=_workspace(q, tokens * splits), query_start_loc=query_start_loc, window=window,
    )  # fmt: skip
    attention = module.PrefillAttention(shape, cache.shape[2], tiles, plan, tokens)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    attention(q, cache, out, sinks)
    return out


def _workspace(q: Tensor, count: int) -> Tensor:
    size = workspace_elements(count, *q.shape[1:])
    return torch.empty(size, dtype=torch.float32, device=q.device)


def plain_attention(q: Tensor, cache: Tensor, plan: TritonPlan, scale: float) -> Tensor:
    """What the kernels compute for a plan of one kind of rows, over what its block table names."""
    starts = list(range(len(plan.seq_lens) + 1))
    if plan.query_start_loc is not None:
        starts = plan.query_start_loc.tolist()
    out = []
    for row, length in enumerate(plan.seq_lens.tolist()):
        line = int(plan.table_rows[row])
        keys, values = cache[:, plan.block_table[line].long()].flatten(1, 2)[:, :length]
        out.append(attend(q[starts[row] : starts[row + 1]], keys, values, scale, None, None))
    return torch.cat(out).to(q.dtype).flatten(1)


def expected_rows(case: AttentionCase, batch: PagedBatch) -> list[Tensor]:
    """Float64 ``[count, Hq, D]`` per row; zeros for an empty sequence."""
    starts = batch.query_start_loc.tolist()
    q = batch.q.cpu()
    rows = []
    for row, (k, v) in enumerate(zip(batch.keys, batch.values, strict=True)):
        queries = q[starts[row] : starts[row + 1]]
        if len(k):
            rows.append(attend(queries, k, v, case.scale, case.softcap, case.window, batch.sinks))
        else:
            rows.append(torch.zeros(queries.shape, dtype=torch.float64))
    return rows


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """By the norm of each vector's error, so that one wrong head shows; NaN never passes."""
    found, expected = found.cpu().double(), expected.double()
    error = (found - expected).norm(dim=-1)
    bound = TOLERANCE[dtype] * expected.norm(dim=-1) + 1e-30
    wrong = ~(error <= bound)
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} vectors are off, "
        f"the first at {tuple(wrong.nonzero()[0].tolist())}, by up to {error[wrong].max():.3g}"
    )
