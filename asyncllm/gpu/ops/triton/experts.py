"""TritonExperts: experts as two grouped matrix products, over rows sorted by expert.

The grid is an upper bound on the number of tiles. The host knows it without reading the routing, so
that a CUDA graph can capture the launch. Each program finds its expert by binary search. The
activation is fused into the first product; the second also multiplies by the routing weights.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.triton.activation import activate_gate
from asyncllm.gpu.ops.triton.expert_pairs import sort_pairs, sum_experts
from asyncllm.gpu.ops.triton.tuning import cdiv, grouped_matmul_tiles


@triton.jit
def find_expert(tile_ends, num_experts, tile):
    """The expert of a tile; ``num_experts`` for tiles after the last expert's."""
    low = 0
    high = num_experts
    while low < high:
        middle = (low + high) // 2
        if tl.load(tile_ends + middle) <= tile:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def find_rows(expert_starts, tile_ends, expert, tile, ROWS: tl.constexpr):
    """Indices of a tile's rows among the sorted pairs, and whether each is of the tile's expert."""
    first_tile = tl.load(tile_ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(expert_starts + expert + 1)
    rows = tl.load(expert_starts + expert) + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    return rows, rows < end


@triton.jit
def gate_up_kernel(
    out,
    x,
    weight,
    bias,
    pairs,
    expert_starts,
    tile_ends,
    num_experts,
    top_k,
    hidden_size,
    intermediate_size,
    limit,
    alpha,
    stride_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Computes the activated gate-up product by expert; grid ``(tiles, blocks of columns)``.

    ``bias`` and ``limit`` may be None. With a limit, gate and up are clamped, as in gpt-oss.
    """
    tile = tl.program_id(0)
    expert = find_expert(tile_ends, num_experts, tile)
    if expert >= num_experts:
        return
    rows, real = find_rows(expert_starts, tile_ends, expert, tile, ROWS)
    tokens = tl.load(pairs + rows, mask=real, other=0).to(tl.int64) // top_k
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = columns < intermediate_size
    # Offsets need 64 bits: all experts' weights together may have more than 2**31 elements.
    own = expert.to(tl.int64) * 2 * intermediate_size
    x_at = x + tokens[:, None] * stride_x
    gate_at = weight + (own + columns)[None, :] * hidden_size
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, hidden_size, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        deep = depth < hidden_size
        a = tl.load(x_at + depth[None, :], mask=real[:, None] & deep[None, :], other=0.0)
        mask = deep[:, None] & in_columns[None, :]
        at = gate_at + depth[:, None]
        gate = tl.dot(a, tl.load(at, mask=mask, other=0.0), gate, input_precision="ieee")
        at += intermediate_size.to(tl.int64) * hidden_size
        up = tl.dot(a, tl.load(at, mask=mask, other=0.0), up, input_precision="ieee")
    if bias is not None:
        bias_at = bias + own + columns
        gate += tl.load(bias_at, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_at + intermediate_size, mask=in_columns, other=0.0).to(tl.float32)[
            None, :
        ]
    # Round as a linear layer rounds its output.
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    if limit is not None:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    else:
        result = activate_gate(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32) * up
    out_at = out + rows.to(tl.int64)[:, None] * intermediate_size + columns[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=real[:, None] & in_columns[None, :])


@triton.jit
def down_kernel(
    out,
    x,
    weight,
    bias,
    routing_weights,
    pairs,
    expert_starts,
    tile_ends,
    num_experts,
    hidden_size,
    intermediate_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes the weighted float32 result of each pair; grid ``(tiles, blocks of columns)``.

    ``bias`` may be None.
    """
    tile = tl.program_id(0)
    expert = find_expert(tile_ends, num_experts, tile)
    if expert >= num_experts:
        return
    rows, real = find_rows(expert_starts, tile_ends, expert, tile, ROWS)
    pair = tl.load(pairs + rows, mask=real, other=0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = columns < hidden_size
    own = expert.to(tl.int64) * hidden_size
    x_at = x + rows.to(tl.int64)[:, None] * intermediate_size
    weight_at = weight + (own + columns)[None, :] * intermediate_size
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, intermediate_size, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        deep = depth < intermediate_size
        a = tl.load(x_at + depth[None, :], mask=real[:, None] & deep[None, :], other=0.0)
        mask = deep[:, None] & in_columns[None, :]
        b = tl.load(weight_at + depth[:, None], mask=mask, other=0.0)
        result = tl.dot(a, b, result, input_precision="ieee")
    if bias is not None:
        shift = tl.load(bias + own + columns, mask=in_columns, other=0.0)
        result += shift.to(tl.float32)[None, :]
    result *= tl.load(routing_weights + pair, mask=real, other=0.0)[:, None]
    out_at = out + pair[:, None] * hidden_size + columns[None, :]
    tl.store(out_at, result, mask=real[:, None] & in_columns[None, :])


class TritonExperts:
    """``Experts`` by Triton kernels, without reads on the host.

    Args:
        weights: weights of scheme "plain".
    """

    def __init__(self, weights: ExpertsWeights, config: ActivationConfig) -> None:
        self.num_experts, self.config = weights.num_experts, config
        self.hidden_size, self.intermediate_size = weights.hidden_size, weights.intermediate_size
        self.gate_up, self.down = weights.gate_up.values, weights.down.values
        self.gate_up_bias, self.down_bias = weights.gate_up.bias, weights.down.bias

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        tokens, top_k = ids.shape
        summed = x.new_empty((tokens, self.hidden_size))
        if not tokens:
            return summed
        config, num_pairs = self.config, tokens * top_k
        shape = grouped_matmul_tiles(num_pairs, self.num_experts, x.element_size())
        plan = (*sort_pairs(ids, self.num_experts, shape.rows), self.num_experts)
        # Upper bounds on the number of tiles: an expert adds at most one tile that is not full, and
        # a tile has at least one pair.
        tiles = min(num_pairs, num_pairs // shape.rows + self.num_experts)
        activated = x.new_empty((tokens, top_k * self.intermediate_size))
        out = x.new_empty((tokens, top_k * self.hidden_size), dtype=torch.float32)
        constants = {"ROWS": shape.rows, "COLUMNS": shape.columns, "DEPTH": shape.depth}
        constants |= {"num_warps": shape.warps, "num_stages": shape.stages}
        x = x if x.stride(1) == 1 else x.contiguous()
        gate_up_kernel[(tiles, cdiv(self.intermediate_size, shape.columns))](
            activated,
            x,
            self.gate_up,
            self.gate_up_bias,
            *plan,
            top_k,
            self.hidden_size,
            self.intermediate_size,
            config.limit,
            config.alpha,
            x.stride(0),
            ACTIVATION="gelu" if config.gelu else "silu",
            **constants,
        )
        down_kernel[(tiles, cdiv(self.hidden_size, shape.columns))](
            out,
            activated,
            self.down,
            self.down_bias,
            weights,
            *plan,
            self.hidden_size,
            self.intermediate_size,
            **constants,
        )
        sum_experts(summed, out, top_k, shared, gate)
        return summed
