"""sort_pairs, sum_experts: sort pairs of token and expert by expert, and sum by token.

Nothing is read on the host. No two programs write to the same element, so that the order of an
expert's pairs, and of the terms of a token's sum, is the same in each run.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.tuning import cdiv

BLOCK = tl.constexpr(1024)


# The number of tokens varies by step. A kernel specialised on it would be compiled again while
# requests are served.
@triton.jit(do_not_specialize=["num_tokens"])
def sort_pairs_kernel(
    pairs,
    starts,
    ids,
    num_tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Writes an expert's pairs of (token, expert) after those of earlier experts; grid
    ``(experts,)``.

    Each program reads all ids twice, which is cheap because they are few.
    """
    expert = tl.program_id(0)
    count = num_tokens * TOP_K
    before = 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.load(ids + at, mask=at < count, other=EXPERTS)
        before += tl.sum((found < expert).to(tl.int32), 0)
    tl.store(starts + expert, before)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        own = tl.load(ids + at, mask=at < count, other=EXPERTS) == expert
        place = before + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(pairs + place, at, mask=own)
        before += tl.sum(own.to(tl.int32), 0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, before)


@triton.jit
def tile_ends_kernel(tile_ends, starts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Computes the end of each expert's tiles as a tile index; grid ``(1,)``."""
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    real = experts < EXPERTS
    count = tl.load(starts + experts + 1, mask=real, other=0)
    count -= tl.load(starts + experts, mask=real, other=0)
    tl.store(tile_ends + experts, tl.cumsum((count + (ROWS - 1)) // ROWS, 0), mask=real)


@triton.jit
def sum_experts_kernel(
    out,
    x,
    shared,
    gate,
    width,
    stride_shared,
    stride_gate,
    TOP_K: tl.constexpr,
):
    """Sums the outputs of a token's experts; grid ``(rows, blocks of width)``.

    The terms are in the order of the token's expert ids. The output of shared experts, if there are
    any, is added last, multiplied by the sigmoid of ``gate`` unless that is None.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(TOP_K):
        total += tl.load(x + (row * TOP_K + place) * width + columns, mask=real, other=0.0)
    # Round after each operation, as ``add_shared_expert`` does.
    result = total.to(out.dtype.element_ty)
    if shared is not None:
        beside = tl.load(shared + row * stride_shared + columns, mask=real, other=0.0)
        if gate is not None:
            logit = tl.load(gate + row * stride_gate).to(tl.float32)
            factor = (1.0 / (1.0 + tl.exp(-logit))).to(out.dtype.element_ty).to(tl.float32)
            beside = (beside.to(tl.float32) * factor).to(out.dtype.element_ty)
        result = (result.to(tl.float32) + beside.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, result, mask=real)


def sort_pairs(ids: Tensor, num_experts: int, rows_per_tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts pairs of token and expert by expert.

    Args:
        ids: ``[T, top_k]`` int32, each below ``num_experts``.

    Returns:
        Three int32 tensors: the sorted pairs ``[T, top_k]``, as ``token * top_k + place``; the
        index of each expert's first pair ``[1, num_experts + 1]``, the last of which is the number
        of pairs; and the index of the tile after each expert's last ``[1, num_experts]``.
    """
    tokens, top_k = ids.shape
    pairs = ids.new_empty((tokens, top_k))
    starts, tile_ends = (ids.new_empty((1, num_experts + more)) for more in (1, 0))
    sort_pairs_kernel[(num_experts,)](
        pairs, starts, ids, tokens, EXPERTS=num_experts, TOP_K=top_k, num_warps=4
    )
    tile_ends_kernel[(1,)](tile_ends, starts, EXPERTS=num_experts, ROWS=rows_per_tile, num_warps=4)
    return pairs, starts, tile_ends


def sum_experts(
    out: Tensor, x: Tensor, top_k: int, shared: Tensor | None, gate: Tensor | None
) -> None:
    """Sums the experts of each token into ``out [T, H]``.

    Args:
        x: ``[T, top_k * H]`` float32, the experts' outputs times their weights.
        shared, gate: see ``Experts``.
    """
    tokens, width = out.shape
    sum_experts_kernel[(tokens, cdiv(width, BLOCK.value))](
        out,
        x,
        shared,
        gate,
        width,
        None if shared is None else shared.stride(0),
        None if gate is None else gate.stride(0),
        TOP_K=top_k,
        num_warps=4,
    )
