"""Layers with a state of each sequence, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from asyncllm.gpu.ops.triton.op_set import TritonOps
from tests import recurrent_checks

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize(
    ("channels", "width", "dtype"), [(37, 4, torch.float32), (300, 2, torch.bfloat16)]
)
def test_causal_conv(channels: int, width: int, dtype: torch.dtype) -> None:
    recurrent_checks.check_causal_conv(TritonOps(), channels, width, dtype, TOLERANCE[dtype])


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
@pytest.mark.parametrize("size", [16, 21])
def test_gated_norm(size: int, dtype: torch.dtype) -> None:
    recurrent_checks.check_gated_norm(TritonOps(), size, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sigmoid_mul(dtype: torch.dtype) -> None:
    recurrent_checks.check_sigmoid_mul(TritonOps(), dtype, TOLERANCE[dtype])
