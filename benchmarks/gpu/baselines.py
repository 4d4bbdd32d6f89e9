"""Other implementations of attention over the same paged cache, where they can be imported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Container

import torch
from torch import Tensor

from benchmarks.gpu.paged_inputs import PagedInputs

Calls = list[Callable[[], Tensor]]


def varlen_calls(inputs: PagedInputs, *, gather: bool) -> Calls:
    """``torch.nn.attention.varlen.varlen_attn`` over K and V that were gathered from their
    pages. With ``gather`` the gathering is part of each call; without it all calls read the
    first input's, and only where that is larger than the cache do they measure anything.

    Raises:
        ImportError: this torch has no such function.
    """
    attend: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    load, device = inputs.load, inputs.cache.device
    steps = torch.arange(load.batch + 1, dtype=torch.int32, device=device)
    width = inputs.tables.shape[1] * inputs.cache.shape[2]
    if width != load.kv_len:
        raise ValueError(f"{load.kv_len} tokens are not whole blocks: nothing to gather as one")
    extra = varlen_options(inspect.signature(attend).parameters)
    shape = (load.batch * inputs.tables.shape[1], *inputs.cache.shape[2:])
    buffers = [inputs.cache.new_empty(shape) for _ in range(2)]

    def call(number: int) -> Tensor:
        if gather:
            for side in (0, 1):
                _gathered(inputs, number, side, out=buffers[side])
        k, v = (buffer.flatten(0, 1) for buffer in buffers)
        return attend(
            inputs.queries[number],
            k,
            v,
            steps * load.queries,
            steps * load.kv_len,
            load.queries,
            load.kv_len,
            # Queries are aligned to the end of the keys; (-1, 0) hides what comes after.
            window_size=(-1, 0),
            **extra,
        )

    if not gather:
        for side in (0, 1):
            _gathered(inputs, 0, side, out=buffers[side])
    return [lambda number=number: call(number) for number in range(inputs.count)]


def varlen_options(parameters: Container[str]) -> dict[str, object]:
    """Options that later versions of ``varlen_attn`` need, as far as this one has them: one
    split, because several are silently wrong in some; and grouped heads, which earlier ones
    take as they are."""
    wanted: dict[str, object] = {"num_splits": 1, "enable_gqa": True}
    return {name: value for name, value in wanted.items() if name in parameters}


def _gathered(inputs: PagedInputs, number: int, side: int, out: Tensor | None = None) -> Tensor:
    """``[batch * W, block_size, Hk, D]``: the blocks of one input in order of position."""
    return torch.index_select(inputs.cache[side], 0, inputs.table(number).flatten(), out=out)


def flash3_calls(inputs: PagedInputs) -> Calls:
    """FlashAttention 3 on the pages themselves.

    Raises:
        ImportError: it is not installed.
    """
    attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    load, device = inputs.load, inputs.cache.device
    seq_lens = inputs.seq_lens
    starts = torch.arange(load.batch + 1, dtype=torch.int32, device=device) * load.queries

    def call(number: int) -> Tensor:
        return attend(
            inputs.queries[number],
            inputs.cache[0],
            inputs.cache[1],
            cache_seqlens=seq_lens,
            page_table=inputs.table(number),
            cu_seqlens_q=starts,
            max_seqlen_q=load.queries,
            causal=True,
        )

    return [lambda number=number: call(number) for number in range(inputs.count)]
