"""TritonGatedDelta: the gated delta rule of ``gpu/ops/gated_delta.py``, in Triton."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.ops.gated_delta import NORM_EPS, DecayParameters
from asyncllm.gpu.ops.triton.state_rows import TritonStateRows
from asyncllm.gpu.ops.triton.tuning import cdiv

TOKEN_KERNEL_COLUMNS, CHUNK_KERNEL_COLUMNS = tl.constexpr(32), tl.constexpr(16)
"""Columns of a head's state per program of ``delta_token_kernel`` and ``delta_chunk_kernel``."""

CHUNK_TOKENS = tl.constexpr(16)
"""Tokens per chunk."""


@triton.jit
def _log_decay(a, dt_bias, log_rate, head):
    """Log decay g of a head, as in ``DecayParameters``, from its logits ``a``."""
    rate = tl.exp(tl.load(log_rate + head))
    x = a.to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -rate * softplus


@triton.jit
def _load_state(
    state,
    is_new,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS_PER_PROGRAM: tl.constexpr,
):
    """Loads a program's columns of a head's state; zeros for a new sequence.

    Returns the row numbers, column numbers, addresses, mask and values.
    """
    keys = tl.arange(0, max(16, triton.next_power_of_2(KEY_DIM)))
    values = tl.program_id(2) * COLUMNS_PER_PROGRAM + tl.arange(0, COLUMNS_PER_PROGRAM)
    own = (keys[:, None] < KEY_DIM) & (values[None, :] < VALUE_DIM)
    matrix = state + (keys[:, None] * VALUE_DIM + values[None, :])
    held = tl.load(matrix, mask=own & (is_new == 0), other=0.0)
    return keys, values, matrix, own, held


@triton.jit
def delta_token_kernel(
    out,
    qkv,
    gates,
    state,
    dt_bias,
    log_rate,
    slots,
    positions,
    query_start,
    stride_qkv,
    stride_gates,
    eps,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INCLUDE_LONG_ROWS: tl.constexpr,
    HAS_PREFILL_ROWS: tl.constexpr,
):
    """Computes the gated delta rule token by token, for rows of one token; for longer rows too with
    INCLUDE_LONG_ROWS.

    Grid ``(rows, NUM_HEADS, blocks of values)``. There are GROUP value heads per key head.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = row, 1
    if HAS_PREFILL_ROWS:
        first = tl.load(query_start + row)
        count = (tl.load(query_start + row + 1) - first).to(tl.int32)
    if (not INCLUDE_LONG_ROWS) and (count != 1):
        return
    # Skip rows without tokens: loads for them would read another row's token, or beyond the end.
    if INCLUDE_LONG_ROWS and (count == 0):
        return
    state += (tl.load(slots + row) * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    is_new = tl.load(positions + first) == 0
    keys, values, matrix, own, held = _load_state(
        state, is_new, KEY_DIM, VALUE_DIM, TOKEN_KERNEL_COLUMNS
    )
    size = (NUM_HEADS // GROUP) * KEY_DIM
    for i in range(count):
        token = first + i
        at = qkv + token * stride_qkv + (head // GROUP) * KEY_DIM + keys
        q = tl.load(at, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        k = tl.load(at + size, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * (KEY_DIM**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
        at = qkv + token * stride_qkv + 2 * size + head * VALUE_DIM + values
        v = tl.load(at, mask=values < VALUE_DIM, other=0.0).to(tl.float32)
        gate = gates + token * stride_gates + head
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
        held *= tl.exp(_log_decay(tl.load(gate + NUM_HEADS), dt_bias, log_rate, head))
        change = (v - tl.sum(held * k[:, None], 0)) * beta
        held += k[:, None] * change[None, :]
        found = tl.sum(held * q[:, None], 0).to(out.dtype.element_ty)
        to = out + (token * NUM_HEADS + head) * VALUE_DIM + values
        tl.store(to, found, mask=values < VALUE_DIM)
    tl.store(matrix, held, mask=own)


@triton.jit
def delta_chunk_kernel(
    out,
    qkv,
    gates,
    state,
    dt_bias,
    log_rate,
    slots,
    positions,
    query_start,
    stride_qkv,
    stride_gates,
    eps,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Computes rows of several tokens in chunks of CHUNK_TOKENS; grid as in ``delta_token_kernel``.

    The formulas are those of ``_compute_chunk`` in ``gpu/ops/gated_delta.py``. The triangular
    system is solved by forward substitution. Products are in TensorFloat-32, whose mantissa has at
    least as many bits as those of float16 and bfloat16.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    if count <= 1:
        return
    steps = tl.arange(0, CHUNK_TOKENS)
    state += (tl.load(slots + row) * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    is_new = tl.load(positions + first) == 0
    keys, values, matrix, own, held = _load_state(
        state, is_new, KEY_DIM, VALUE_DIM, CHUNK_KERNEL_COLUMNS
    )
    size = (NUM_HEADS // GROUP) * KEY_DIM
    for start in range(0, count, CHUNK_TOKENS):
        real = start + steps < count
        token = first + start + steps
        # Tokens after the last one change nothing: their log decay, key and value are 0.
        gate = gates + token * stride_gates + head
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gate, mask=real, other=0.0).to(tl.float32)))
        logit = tl.load(gate + NUM_HEADS, mask=real, other=0.0)
        decay = tl.where(real, _log_decay(logit, dt_bias, log_rate, head), 0.0)
        total, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        between = total[:, None] - total[None, :]
        between = tl.exp(tl.where(steps[:, None] >= steps[None, :], between, -float("inf")))
        past = tl.exp(total)[:, None]
        at = qkv + token[:, None] * stride_qkv + (head // GROUP) * KEY_DIM + keys[None, :]
        some = real[:, None] & (keys[None, :] < KEY_DIM)
        k = tl.load(at + size, mask=some, other=0.0).to(tl.float32)
        length = tl.rsqrt(tl.sum(k * k, 1) + eps)
        k *= length[:, None]
        system = tl.dot(k, tl.trans(k), input_precision="tf32") * between * beta[:, None]
        system = tl.where(steps[:, None] > steps[None, :], system, 0.0)
        from_state = tl.dot(k, held, input_precision="tf32") * past
        q = tl.load(at, mask=some, other=0.0).to(tl.float32)
        q *= (tl.rsqrt(tl.sum(q * q, 1) + eps) * (KEY_DIM**-0.5))[:, None]
        scores = tl.dot(q, tl.trans(k), input_precision="tf32") * between
        found = tl.dot(q, held, input_precision="tf32") * past
        at = qkv + token[:, None] * stride_qkv + 2 * size + head * VALUE_DIM + values[None, :]
        wanted = real[:, None] & (values[None, :] < VALUE_DIM)
        v = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        change = (v - from_state) * beta[:, None]
        for i in range(1, CHUNK_TOKENS):
            system_row = tl.sum(tl.where((steps == i)[:, None], system, 0.0), 0)
            less = tl.sum(system_row[:, None] * change, 0)
            change -= tl.where((steps == i)[:, None], less[None, :], 0.0)
        found += tl.dot(scores, change, input_precision="tf32")
        to = out + (token[:, None] * NUM_HEADS + head) * VALUE_DIM + values[None, :]
        tl.store(to, found.to(out.dtype.element_ty), mask=wanted)
        # Read the keys again: kept until here, they would take the registers that the state needs.
        at = qkv + token[None, :] * stride_qkv + size + (head // GROUP) * KEY_DIM + keys[:, None]
        some = real[None, :] & (keys[:, None] < KEY_DIM)
        k = tl.load(at, mask=some, other=0.0).to(tl.float32)
        k *= (length * tl.exp(whole - total))[None, :]
        held = held * tl.exp(whole) + tl.dot(k, change, input_precision="tf32")
    tl.store(matrix, held, mask=own)


class TritonGatedDelta:
    """``GatedDelta`` by Triton kernels.

    float32 prompts are computed token by token, because exact float32 products of chunks need too
    many registers.
    """

    def __init__(self, shape: LinearAttentionConfig, decay_parameters: DecayParameters) -> None:
        self.shape, self.decay_parameters = shape, decay_parameters

    def __call__(self, qkv: Tensor, gates: Tensor, state: Tensor, rows: TritonStateRows) -> Tensor:
        shape, decay = self.shape, self.decay_parameters
        out = qkv.new_empty((qkv.shape[0], shape.total_value_dim))
        arguments = (
            out, qkv, gates, state, decay.dt_bias, decay.log_rate, rows.slots, rows.positions,
            rows.query_start, qkv.stride(0), gates.stride(0), NORM_EPS,
        )  # fmt: skip
        sizes = {
            "NUM_HEADS": shape.num_value_heads,
            "GROUP": shape.num_value_heads // shape.num_key_heads,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
        }

        def grid(columns: int) -> tuple[int, int, int]:
            return rows.num_rows, shape.num_value_heads, cdiv(shape.value_dim, columns)

        exact = qkv.dtype == torch.float32
        if rows.num_rows:
            delta_token_kernel[grid(TOKEN_KERNEL_COLUMNS.value)](
                *arguments,
                **sizes,
                INCLUDE_LONG_ROWS=exact and rows.is_mixed,
                HAS_PREFILL_ROWS=rows.is_mixed,
                num_warps=8,
            )
        if rows.is_mixed and not exact:
            delta_chunk_kernel[grid(CHUNK_KERNEL_COLUMNS.value)](*arguments, **sizes, num_warps=4)
        return out
