"""Norms, activations, rotation with the cache write, step state, sampling: interpreted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.op_set import TritonOps
from tests.triton import checks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPS = TritonOps()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 100, 2560])
def test_norm(width: int, dtype: torch.dtype) -> None:
    checks.check_norm(OPS, width, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [48, 1100])
def test_activations(width: int, dtype: torch.dtype) -> None:
    checks.check_activations(OPS, width, dtype, "cpu")


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("heads", "block_size", "layout", "dtype"),
    [
        ((4, 2, 64), 16, "layers", torch.bfloat16),
        ((16, 8, 128), 16, "layers", torch.float16),
        ((5, 1, 80), 256, "blocks", torch.float16),
        ((7, 1, 96), 48, "heads", torch.float32),
        ((4, 1, 256), 16, "dims", torch.bfloat16),
        ((8, 2, 512), 16, "layers", torch.bfloat16),
        ((5, 1, 320), 16, "blocks", torch.float16),
    ],
)
def test_rope_cache(
    heads: tuple[int, int, int], norm: bool, block_size: int, layout: str, dtype: torch.dtype
) -> None:
    cache = {"block_size": block_size, "layout": layout, "dtype": dtype}
    checks.check_rope_cache(OPS, AttentionShape(*heads, 1.0), "cpu", norm=norm, **cache)


NORMS = [
    {"whole": True, "wide": True},
    {"scaled": True},
    {"whole": True, "wide": True, "scaled": True},
    {"values": True},
]


@pytest.mark.parametrize(
    ("options", "head_dim", "dtype"),
    [
        *((options, 48, dtype) for options in NORMS for dtype in DTYPES),
        ({"values": True}, 512, torch.bfloat16),
    ],
    ids=str,
)
def test_norms_before_a_rotation(options: dict, head_dim: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(6, 2, head_dim, 1.0)
    checks.check_rope_cache(OPS, shape, "cpu", norm=True, dtype=dtype, **options)


@pytest.mark.parametrize("block_size", [16, 256])
def test_step_state(block_size: int) -> None:
    checks.check_step_state(OPS.decode_inputs, "cpu", block_size)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (700, torch.float32),
        (600, torch.bfloat16),
        pytest.param(5003, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sampling(vocab_size: int, dtype: torch.dtype) -> None:
    """In bfloat16 logits tie."""
    logits, *parameters = checks.sampling_rows(20, vocab_size, seed=2)
    checks.check_sampling(OPS.sample, ((logits * 0.5).to(dtype), *parameters), "cpu")


@pytest.mark.parametrize("check", [checks.check_odd_rows, checks.check_company, checks.check_top_k])
def test_rows_of_a_sample(check: Callable[..., None]) -> None:
    check(OPS.sample, "cpu")
