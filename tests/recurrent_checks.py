"""Checks of recurrent ops, for every op set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.gated_delta import DecayParameters
from tests.step_inputs import planned

Rows = list[tuple[int, int, int]]
"""Slot, first position and tokens of each."""

STEP: Rows = [(3, 5, 1), (1, 0, 1), (0, 0, 70), (2, 8, 9), (5, 3, 2)]
"""Two decode rows among them, and two rows that start from no state."""

TOKENS, SLOTS = 83, 6


def state_inputs(rows: Rows, device: str = "cpu") -> StepInputs:
    slots, starts, counts = np.array(rows, dtype=np.int64).T.copy()
    positions = torch.tensor(
        [start + i for _, start, count in rows for i in range(count)], device=device
    )
    table = np.zeros((SLOTS, 1), np.int32)
    return planned(table, slots, starts, counts, 4, device, tokens=positions, positions=positions)


def check_rows(
    run: Callable[[Rows, Tensor, slice], Tensor],
    state: Tensor,
    expected_state: Tensor,
    expected: Tensor,
    tolerance: float,
    *,
    exact: bool,
) -> None:
    """What ``run(rows, state, tokens)`` makes of STEP: in one step, of each row alone, and of a
    prompt in chunks; the same bits where ``exact``."""
    left = state.clone()
    found = run(STEP, left, slice(None))
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(left.double().cpu(), expected_state, rtol=tolerance, atol=tolerance)
    assert torch.equal(left[4], state[4])
    near, start = 0.0 if exact else 2 * tolerance, 0
    for slot, first, count in STEP:
        own, parts = state.clone(), []
        for at in range(0, count, 23):
            some = min(23, count - at)
            tokens = slice(start + at, start + at + some)
            parts.append(run([(slot, first + at, some)], own, tokens))
        rest = found[start : start + count]
        torch.testing.assert_close(torch.cat(parts), rest, rtol=near, atol=near)
        torch.testing.assert_close(own[slot], left[slot], rtol=near, atol=near)
        start += count


def check_causal_conv(
    ops: Any, channels: int, width: int, dtype: torch.dtype, tolerance: float, device: str = "cpu"
) -> None:
    """On a part of wider rows, as the projections' outputs are."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(channels, width, generator=generator).to(dtype)
    x = torch.randn(TOKENS, channels + 5, generator=generator).to(dtype)[:, :channels]
    state = torch.randn(SLOTS, width - 1, channels, generator=generator).to(dtype)
    expected, last, start = torch.empty(TOKENS, channels).double(), state.double(), 0
    for slot, first, count in STEP:
        before = last[slot] * bool(first)
        inputs = torch.cat((before, x[start : start + count].double()))
        for i in range(count):
            expected[start + i] = F.silu((inputs[i : i + width] * weight.double().T).sum(0))
        last[slot] = inputs[1 - width :]
        start += count
    conv, there = ops.causal_conv(weight.to(device)), x.to(device)

    def run(rows: Rows, state: Tensor, tokens: slice) -> Tensor:
        return conv(there[tokens], state, ops.state_rows(state_inputs(rows, device)))

    exact = ops.name == "native"
    check_rows(run, state.to(device), last, expected, tolerance, exact=exact)


def delta_in_double(
    shape: LinearAttentionConfig, qkv: Tensor, gates: Tensor, biases: DecayParameters, state: Tensor
) -> Tensor:
    """The rule token by token, through the rows of STEP; ``state``, of float64, becomes theirs."""
    group = shape.num_value_heads // shape.num_key_heads
    q, k, v = qkv.double().split(
        [shape.total_key_dim, shape.total_key_dim, shape.total_value_dim], 1
    )
    q, k = (part.unflatten(1, (-1, shape.key_dim)) for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    v, (b, a) = v.unflatten(1, (-1, shape.value_dim)), gates.double().chunk(2, 1)
    decay = torch.exp(-biases.log_rate.double().exp() * F.softplus(a + biases.dt_bias.double()))
    out, start = torch.empty_like(v), 0
    for slot, first, count in STEP:
        for head in range(shape.num_value_heads):
            matrix = state[slot, head] * bool(first)
            for token in range(start, start + count):
                key = k[token, head // group]
                matrix = matrix * decay[token, head]
                change = (v[token, head] - matrix.T @ key) * b[token, head].sigmoid()
                matrix = matrix + torch.outer(key, change)
                out[token, head] = matrix.T @ q[token, head // group] * shape.key_dim**-0.5
            state[slot, head] = matrix
        start += count
    return out.flatten(1)


def check_gated_delta(
    ops: Any, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Tokens that repeat a key among them, and decays that leave nothing, and all."""
    config, generator = LinearAttentionConfig((True,), *shape, 4), torch.Generator().manual_seed(12)
    heads = config.num_value_heads
    qkv = torch.randn(TOKENS, config.conv_channels, generator=generator).to(dtype)
    qkv[10:30] = qkv[10].clone()
    gates = torch.randn(TOKENS, 2 * heads + 3, generator=generator).mul(2).to(dtype)
    gates = gates[:, : 2 * heads]
    gates[40:44, heads:], gates[20:30, heads:] = 200.0, -200.0
    biases = DecayParameters(*torch.randn(2, heads, generator=generator))
    state = torch.randn(SLOTS, heads, config.key_dim, config.value_dim, generator=generator)
    last = state.double()
    expected = delta_in_double(config, qkv, gates, biases, last)
    there = DecayParameters(biases.dt_bias.to(device), biases.log_rate.to(device))
    delta, qkv, gates = ops.gated_delta(config, there), qkv.to(device), gates.to(device)

    def run(rows: Rows, state: Tensor, tokens: slice) -> Tensor:
        return delta(qkv[tokens], gates[tokens], state, ops.state_rows(state_inputs(rows, device)))

    state = state.to(device)
    if dtype == torch.float32:
        check_rows(run, state, last, expected, 2e-5, exact=ops.name == "native")
        return
    found = run(STEP, state, slice(None))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-2, atol=1e-2)
    # TensorFloat-32 has 10 bits of a number.
    near = 5e-3 if device == "cuda" else 2e-5
    torch.testing.assert_close(state.double().cpu(), last, rtol=near, atol=near)


def check_gated_norm(
    ops: Any, size: int, dtype: torch.dtype, tolerance: float, device: str = "cpu"
) -> None:
    generator = torch.Generator().manual_seed(13)
    weight = torch.randn(size, generator=generator).to(dtype)
    x, both = (torch.randn(5, size * n, generator=generator).mul(3).to(dtype) for n in (3, 7))
    heads = x.double().unflatten(1, (3, size))
    normed = heads * (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    expected = normed.flatten(1) * F.silu(both[:, 4 * size :].double())
    norm = ops.gated_norm(weight.to(device), 1e-6)
    found = norm(x.to(device), both.to(device)[:, 4 * size :])
    assert found.dtype == dtype
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)


def check_sigmoid_mul(ops: Any, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(14)
    x, gate = torch.randn(2, 3, 50, generator=generator).mul(4).to(dtype)
    gate[0, 13:15] = torch.tensor([-200.0, 200.0])
    expected = x[:, :37].double() * gate[:, 13:].double().sigmoid()
    found = ops.sigmoid_mul(x.to(device)[:, :37], gate.to(device)[:, 13:])
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)
