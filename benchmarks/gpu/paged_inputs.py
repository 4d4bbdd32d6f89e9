"""PagedInputs: distinct inputs of one attention load, over one paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.batch.step_inputs import KVGroupInputs, StepInputs
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.attention_plan import TritonPlan
from benchmarks.gpu.shapes import AttentionLoad

BLOCK_SIZE = 16

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, TritonPlan], Tensor]


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Input i of ``count`` has its own queries and its own blocks, in random order.

    Attributes:
        cache: ``[2, num_blocks, BLOCK_SIZE, Hk, D]``, random.
        queries: ``[count, batch * load.queries, Hq, D]``.
        tables: ``[count * batch + 1, W]`` int32; input i has the lines from ``i * batch``.
    """

    load: AttentionLoad
    count: int
    cache: Tensor
    queries: Tensor
    tables: Tensor

    @property
    def seq_lens(self) -> Tensor:
        """``[batch]`` int32, on the device."""
        device = self.cache.device
        if device.type == "meta":
            return torch.empty(self.load.batch, dtype=torch.int32, device=device)
        return torch.tensor(self.load.lengths, dtype=torch.int32, device=device)

    def table(self, number: int) -> Tensor:
        """``[batch, W]`` of one input."""
        batch = self.load.batch
        return self.tables[number * batch : (number + 1) * batch]


def make_inputs(
    load: AttentionLoad, count: int, device: torch.device, seed: int = 0
) -> PagedInputs:
    """bfloat16 inputs, drawn on the device. Behind a sequence's end its table names the null
    block."""
    random = torch.Generator(device=device).manual_seed(seed)
    owned = [-(-length // BLOCK_SIZE) for length in load.lengths]
    width = max(owned)
    blocks = count * sum(owned)
    shape = (2, blocks + 1, BLOCK_SIZE, load.kv_heads, load.head_dim)
    rows = load.batch * load.queries
    cache = torch.empty(shape, dtype=torch.bfloat16, device=device)
    queries = torch.empty(
        count, rows, load.heads, load.head_dim, dtype=torch.bfloat16, device=device
    )
    for tensor in (cache, queries):
        tensor.normal_(generator=random)
    order = torch.randperm(blocks, generator=random, device=device) + 1
    tables = torch.zeros((count * load.batch + 1, width), dtype=torch.int32, device=device)
    used = torch.arange(width, device=device) < torch.tensor(owned, device=device).unsqueeze(1)
    tables[:-1][used.repeat(count, 1)] = order.to(torch.int32)
    return PagedInputs(load, count, cache, queries, tables)


def shaped_inputs(load: AttentionLoad, device: torch.device) -> PagedInputs:
    """One input without contents, for a launch that is compiled and not run. Every size that a
    kernel is compiled for is that of ``make_inputs``."""
    width = -(-max(load.lengths) // BLOCK_SIZE)
    rows, options = load.batch * load.queries, {"dtype": torch.bfloat16, "device": device}
    return PagedInputs(
        load,
        1,
        torch.empty((2, 2, BLOCK_SIZE, load.kv_heads, load.head_dim), **options),
        torch.empty((1, rows, load.heads, load.head_dim), **options),
        torch.empty((load.batch + 1, width), dtype=torch.int32, device=device),
    )


def inputs_bytes(load: AttentionLoad, count: int) -> int:
    """Device memory of ``make_inputs``, and of a second copy of one input's K and V, which a
    baseline gathers."""
    return count * load.bytes + load.kv_bytes


def decode_rows(
    inputs: PagedInputs, number: int, max_len: int, has_balanced_splits: bool = False
) -> StepInputs:
    """One input as the buffers of a decode step whose sequences may grow to ``max_len``."""
    load, device = inputs.load, inputs.cache.device
    slots = torch.arange(load.batch, device=device) + number * load.batch
    nothing = torch.zeros(load.batch, dtype=torch.int64, device=device)
    return StepInputs(
        num_decodes=load.batch,
        token_ids=nothing,
        positions=inputs.seq_lens.long() - 1,
        req_indices=slots,
        seq_lens=inputs.seq_lens,
        query_start_loc=nothing[:0],
        prefill_start_loc=nothing[:0].int(),
        groups=[KVGroupInputs(nothing, inputs.tables, np.zeros((0, 0), np.int32), BLOCK_SIZE)],
        max_num_seqs=len(inputs.tables) - 1,
        max_len=max_len,
        num_logits=load.batch,
        has_balanced_splits=has_balanced_splits,
    )


def decode_calls(
    attention: TritonAttention, inputs: PagedInputs, max_len: int
) -> list[Callable[[], Tensor]]:
    """One launch per input, as the graph has them that the engine takes for these lengths; all
    share a workspace, as the layers of a model do."""
    load = inputs.load
    is_skewed = attention.has_skewed_lengths(load.batch, np.array(load.lengths), max_len, None)
    plans = [
        attention.plan(decode_rows(inputs, number, max_len, is_skewed), None, 0)
        for number in range(inputs.count)
    ]
    for plan in plans:
        plan.workspace = plans[0].workspace
    return [_call(attention, inputs, number, plan) for number, plan in enumerate(plans)]


def prefill_calls(attention: TritonAttention, inputs: PagedInputs) -> list[Callable[[], Tensor]]:
    """One launch of the prefill kernel per input."""
    load, device = inputs.load, inputs.cache.device
    starts = torch.arange(load.batch + 1, dtype=torch.int32, device=device) * load.queries
    plans = [
        TritonPlan(
            num_decodes=0,
            seq_lens=inputs.seq_lens,
            block_table=inputs.tables,
            table_rows=torch.arange(load.batch, device=device) + number * load.batch,
            query_start_loc=starts,
        )
        for number in range(inputs.count)
    ]
    return [_call(attention, inputs, number, plan) for number, plan in enumerate(plans)]


def _call(
    attention: Attend, inputs: PagedInputs, number: int, plan: TritonPlan
) -> Callable[[], Tensor]:
    queries = inputs.queries[number]
    # The kernels read keys and values from the cache alone.
    unread = queries[:, : inputs.load.kv_heads]
    return lambda: attention(queries, unread, unread, inputs.cache, plan)
