"""sort_pairs, sum_experts: sort (token, expert) pairs by expert, and sum outputs by token.

Nothing is read on the host. No two programs write to the same element, so that the order of an
expert's pairs, and of the terms of a token's sum, is the same in each run.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.tuning import cdiv

ELEMENTS_PER_BLOCK = tl.constexpr(1024)


# The number of tokens varies by step. A kernel specialised on it would be compiled again while
# requests are served.
@triton.jit(do_not_specialize=["num_tokens"])
def sort_pairs_kernel(
    pairs,
    expert_starts,
    ids,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Writes an expert's (token, expert) pairs after those of earlier experts; grid
    ``(experts,)``.

    Each program reads all ids twice, which is cheap because they are few.
    """
    expert = tl.program_id(0)
    count = num_tokens * TOP_K
    before = 0
    for first in range(0, count, ELEMENTS_PER_BLOCK):
        at = first + tl.arange(0, ELEMENTS_PER_BLOCK)
        found = tl.load(ids + at, mask=at < count, other=NUM_EXPERTS)
        before += tl.sum((found < expert).to(tl.int32), 0)
    tl.store(expert_starts + expert, before)
    for first in range(0, count, ELEMENTS_PER_BLOCK):
        at = first + tl.arange(0, ELEMENTS_PER_BLOCK)
        own = tl.load(ids + at, mask=at < count, other=NUM_EXPERTS) == expert
        place = before + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(pairs + place, at, mask=own)
        before += tl.sum(own.to(tl.int32), 0)
    if expert == NUM_EXPERTS - 1:
        tl.store(expert_starts + NUM_EXPERTS, before)


@triton.jit
def tile_ends_kernel(
    tile_ends, expert_starts, NUM_EXPERTS: tl.constexpr, ROWS_PER_TILE: tl.constexpr
):
    """Computes, for each expert, one past the index of its last tile; grid ``(1,)``."""
    experts = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))
    real = experts < NUM_EXPERTS
    count = tl.load(expert_starts + experts + 1, mask=real, other=0)
    count -= tl.load(expert_starts + experts, mask=real, other=0)
    num_tiles = (count + (ROWS_PER_TILE - 1)) // ROWS_PER_TILE
    tl.store(tile_ends + experts, tl.cumsum(num_tiles, 0), mask=real)


@triton.jit
def sum_experts_kernel(
    out,
    x,
    shared_output,
    shared_gate,
    width,
    stride_shared,
    stride_gate,
    TOP_K: tl.constexpr,
):
    """Sums the outputs of a token's experts; grid ``(rows, blocks of width)``.

    The terms are in the order in which routing lists the token's experts. ``shared_output``, times
    the sigmoid of ``shared_gate``, is added last; either may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * ELEMENTS_PER_BLOCK + tl.arange(0, ELEMENTS_PER_BLOCK)
    real = columns < width
    total = tl.zeros((ELEMENTS_PER_BLOCK,), tl.float32)
    for place in range(TOP_K):
        total += tl.load(x + (row * TOP_K + place) * width + columns, mask=real, other=0.0)
    # Round after each operation, as ``add_shared_expert`` does.
    result = total.to(out.dtype.element_ty)
    if shared_output is not None:
        beside = tl.load(shared_output + row * stride_shared + columns, mask=real, other=0.0)
        if shared_gate is not None:
            logit = tl.load(shared_gate + row * stride_gate).to(tl.float32)
            factor = (1.0 / (1.0 + tl.exp(-logit))).to(out.dtype.element_ty).to(tl.float32)
            beside = (beside.to(tl.float32) * factor).to(out.dtype.element_ty)
        result = (result.to(tl.float32) + beside.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, result, mask=real)


def sort_pairs(ids: Tensor, num_experts: int, rows_per_tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts (token, expert) pairs by expert.

    Args:
        ids: ``[T, top_k]`` int32, each below ``num_experts``.

    Returns:
        Three int32 tensors:

        - ``[T, top_k]``, the sorted pairs, as flat indices into ``ids``;
        - ``[1, num_experts + 1]``, the index of each expert's first pair, then the number of pairs;
        - ``[1, num_experts]``, one past the index of each expert's last tile.
    """
    tokens, top_k = ids.shape
    pairs = ids.new_empty((tokens, top_k))
    expert_starts, tile_ends = (ids.new_empty((1, num_experts + more)) for more in (1, 0))
    sort_pairs_kernel[(num_experts,)](
        pairs, expert_starts, ids, tokens, NUM_EXPERTS=num_experts, TOP_K=top_k, num_warps=4
    )
    tile_ends_kernel[(1,)](
        tile_ends, expert_starts, NUM_EXPERTS=num_experts, ROWS_PER_TILE=rows_per_tile, num_warps=4
    )
    return pairs, expert_starts, tile_ends


def sum_experts(
    out: Tensor, x: Tensor, top_k: int, shared_output: Tensor | None, shared_gate: Tensor | None
) -> None:
    """Sums the outputs of each token's experts into ``out [T, H]``.

    Args:
        x: ``[T, top_k * H]`` float32, the experts' outputs times their weights.
        shared_output, shared_gate: see ``Experts``.
    """
    tokens, width = out.shape
    sum_experts_kernel[(tokens, cdiv(width, ELEMENTS_PER_BLOCK.value))](
        out,
        x,
        shared_output,
        shared_gate,
        width,
        None if shared_output is None else shared_output.stride(0),
        None if shared_gate is None else shared_gate.stride(0),
        TOP_K=top_k,
        num_warps=4,
    )
