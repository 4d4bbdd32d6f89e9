"""Layers with a state of each sequence, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.ops.gated_delta import DeltaBiases
from asyncllm.gpu.ops.triton.op_set import TritonOps
from tests import recurrent_checks
from tests.op_sets import TOLERANCE


@pytest.mark.parametrize(
    ("channels", "width", "dtype"), [(37, 4, torch.float32), (300, 2, torch.bfloat16)]
)
def test_causal_conv(channels: int, width: int, dtype: torch.dtype) -> None:
    recurrent_checks.check_causal_conv(TritonOps(), channels, width, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gated_norm_and_gate(dtype: torch.dtype) -> None:
    for size in (16, 21):
        recurrent_checks.check_gated_norm(TritonOps(), size, dtype, TOLERANCE[dtype])
    recurrent_checks.check_sigmoid_mul(TritonOps(), dtype, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 2, 8, 12), torch.float32),
        ((1, 2, 9, 20), torch.bfloat16),
        pytest.param((2, 2, 17, 40), torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["float32", "bfloat16", "odd"],
)
def test_gated_delta(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    recurrent_checks.check_gated_delta(TritonOps(), shape, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_without_tokens_keeps_its_states(dtype: torch.dtype) -> None:
    """Also ahead of a row that starts from no state, and behind all tokens."""
    rows = [(2, 4, 1), (3, 5, 0), (1, 0, 3), (4, 7, 0)]
    config, ops = LinearAttentionConfig((True,), 1, 1, 8, 8, 4), TritonOps()
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4, config.conv_size, generator=random).to(dtype)
    gates = torch.randn(4, 2, generator=random).to(dtype)
    matrices = torch.randn(6, 1, 8, 8, generator=random)
    held = torch.randn(6, 3, config.conv_size, generator=random).to(dtype)
    before = [each.clone() for each in (matrices, held)]
    of_step = ops.state_rows(recurrent_checks.state_inputs(rows))
    ops.causal_conv(torch.ones(config.conv_size, 4).to(dtype))(x, held, of_step)
    ops.gated_delta(config, DeltaBiases(*torch.zeros(2, 1)))(x, gates, matrices, of_step)
    for state, old in zip((matrices, held), before, strict=True):
        kept = [bool(torch.equal(state[slot], old[slot])) for slot in range(6)]
        assert kept == [True, False, False, True, True, True]
