"""TritonCausalConv: the causal depthwise convolution of ``gpu/ops/causal_conv.py``."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.prefill_attention import find_sequence
from asyncllm.gpu.ops.triton.state_rows import TILE_TOKENS, TritonStateRows
from asyncllm.gpu.ops.triton.tuning import cdiv

CHANNELS_PER_PROGRAM = tl.constexpr(256)
TOKENS_PER_TILE = tl.constexpr(TILE_TOKENS)


@triton.jit
def _round_and_silu(x, out_ptr):
    # Round before SiLU, as TorchCausalConv does.
    value = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    return (value / (1.0 + tl.exp(-value))).to(out_ptr.dtype.element_ty)


@triton.jit
def conv_token_kernel(
    out,
    x,
    state,
    weight,
    slots,
    positions,
    query_start,
    stride_x,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_PREFILL_ROWS: tl.constexpr,
):
    """Convolves rows of one token and updates their states; grid ``(rows, blocks of channels)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHANNELS_PER_PROGRAM + tl.arange(0, CHANNELS_PER_PROGRAM)
    real = columns < CHANNELS
    token = row
    if HAS_PREFILL_ROWS:
        token = tl.load(query_start + row)
        if tl.load(query_start + row + 1) - token != 1:
            return
    is_new = tl.load(positions + token) == 0
    state_at = state + tl.load(slots + row) * (WIDTH - 1) * CHANNELS + columns
    newest = tl.load(x + token * stride_x + columns, mask=real, other=0.0)
    total = tl.zeros((CHANNELS_PER_PROGRAM,), tl.float32)
    for i in tl.static_range(WIDTH - 1):
        value = tl.load(state_at + i * CHANNELS, mask=real & (is_new == 0), other=0.0)
        scale = tl.load(weight + i * CHANNELS + columns, mask=real, other=0.0)
        total += value.to(tl.float32) * scale
        if i > 0:
            tl.store(state_at + (i - 1) * CHANNELS, value, mask=real)
    tl.store(state_at + (WIDTH - 2) * CHANNELS, newest, mask=real)
    scale = tl.load(weight + (WIDTH - 1) * CHANNELS + columns, mask=real, other=0.0)
    total += newest.to(tl.float32) * scale
    tl.store(out + token * CHANNELS + columns, _round_and_silu(total, out), mask=real)


@triton.jit(do_not_specialize=["num_rows"])
def conv_chunk_kernel(
    out,
    x,
    state,
    weight,
    slots,
    positions,
    query_start,
    stride_x,
    num_rows,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Convolves one tile of a row with several tokens; grid ``(tiles, blocks of channels)``."""
    tile = tl.program_id(0)
    row = find_sequence(query_start, num_rows, tile, TOKENS_PER_TILE)
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    start = (tile - first // TOKENS_PER_TILE - row) * TOKENS_PER_TILE
    if (count == 1) | (start >= count):
        return
    columns = tl.program_id(1) * CHANNELS_PER_PROGRAM + tl.arange(0, CHANNELS_PER_PROGRAM)
    real = columns[None, :] < CHANNELS
    tokens = start + tl.arange(0, TOKENS_PER_TILE)
    is_new = tl.load(positions + first) == 0
    state_at = state + tl.load(slots + row) * (WIDTH - 1) * CHANNELS
    total = tl.zeros((TOKENS_PER_TILE, CHANNELS_PER_PROGRAM), tl.float32)
    for i in tl.static_range(WIDTH):
        at = (tokens + (i - WIDTH + 1))[:, None]
        inside = real & (at >= 0) & (at < count)
        value = tl.load(x + (first + at) * stride_x + columns[None, :], mask=inside, other=0.0)
        before = real & (at < 0) & (is_new == 0)
        older = tl.load(
            state_at + (at + WIDTH - 1) * CHANNELS + columns[None, :], mask=before, other=0.0
        )
        scale = tl.load(weight + i * CHANNELS + columns, mask=columns < CHANNELS, other=0.0)
        total += (value.to(tl.float32) + older.to(tl.float32)) * scale[None, :]
    at = out + (first + tokens[:, None]) * CHANNELS + columns[None, :]
    tl.store(at, _round_and_silu(total, out), mask=real & (tokens[:, None] < count))


@triton.jit
def conv_state_kernel(
    x,
    state,
    slots,
    positions,
    query_start,
    stride_x,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Updates the states of rows of several tokens; grid ``(rows, blocks of channels)``.

    It is launched after ``conv_chunk_kernel``, which reads the old states.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    if count <= 1:
        return
    columns = tl.program_id(1) * CHANNELS_PER_PROGRAM + tl.arange(0, CHANNELS_PER_PROGRAM)
    real = columns < CHANNELS
    is_new = tl.load(positions + first) == 0
    state_at = state + tl.load(slots + row) * (WIDTH - 1) * CHANNELS + columns
    for i in tl.static_range(WIDTH - 1):
        # Updating in place is safe: an input overwrites an older one, which has been read.
        at = count - (WIDTH - 1) + i
        value = tl.load(x + (first + at) * stride_x + columns, mask=real & (at >= 0), other=0.0)
        kept = real & (at < 0) & (is_new == 0)
        older = tl.load(state_at + (at + WIDTH - 1) * CHANNELS, mask=kept, other=0.0)
        tl.store(state_at + i * CHANNELS, tl.where(at >= 0, value, older), mask=real)


class TritonCausalConv:
    """``CausalConv`` by Triton kernels."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.float().T.contiguous()

    def __call__(self, x: Tensor, state: Tensor, rows: TritonStateRows) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        width, channels = self.weight.shape
        shape = {"CHANNELS": channels, "WIDTH": width, "num_warps": 4}
        blocks, count = cdiv(channels, CHANNELS_PER_PROGRAM.value), rows.num_rows
        of_rows = rows.slots, rows.positions, rows.query_start, x.stride(0)
        if count:
            conv_token_kernel[(count, blocks)](
                out, x, state, self.weight, *of_rows, HAS_PREFILL_ROWS=rows.is_mixed, **shape
            )
        if rows.is_mixed:
            conv_chunk_kernel[(rows.num_tiles, blocks)](
                out, x, state, self.weight, *of_rows, count, **shape
            )
            conv_state_kernel[(count, blocks)](x, state, *of_rows, **shape)
        return out
