"""Norms, activation, rotation with the cache write, and step state, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton import activation, decode_inputs, norm, rope_cache
from tests.triton import checks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 100, 2560])
def test_norm(width: int, dtype: torch.dtype) -> None:
    checks.check_norm(norm, width, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [48, 1100])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    checks.check_silu_mul(activation, width, dtype, "cpu")


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "layout", "dtype"),
    [
        (4, 2, 64, 16, "layers", torch.bfloat16),
        (16, 8, 128, 16, "layers", torch.float16),
        (5, 1, 80, 256, "blocks", torch.float16),
        (7, 1, 96, 48, "heads", torch.float32),
        (4, 1, 256, 16, "dims", torch.bfloat16),
        (8, 2, 512, 16, "layers", torch.bfloat16),
        (5, 1, 320, 16, "blocks", torch.float16),
    ],
)
def test_rope_cache(
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    layout: str,
    dtype: torch.dtype,
    with_norm: bool,
) -> None:
    shape = AttentionShape(heads, kv_heads, dim, 1.0)
    checks.check_rope_cache(
        rope_cache,
        shape,
        "cpu",
        norm=with_norm,
        block_size=block_size,
        layout=layout,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("whole", "scaled"), [(True, False), (False, True), (True, True)])
def test_rope_cache_with_a_norm_over_all_heads_and_scaled_queries(
    whole: bool, scaled: bool, dtype: torch.dtype
) -> None:
    shape = AttentionShape(6, 2, 48, 1.0)
    checks.check_rope_cache(
        rope_cache, shape, "cpu", norm=True, whole=whole, scaled=scaled, dtype=dtype
    )


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*((48, dtype) for dtype in DTYPES), (512, torch.bfloat16)], ids=str
)
def test_rope_cache_with_a_norm_of_values(head_dim: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(6, 2, head_dim, 1.0)
    checks.check_rope_cache(rope_cache, shape, "cpu", norm=True, values=True, dtype=dtype)


@pytest.mark.parametrize("block_size", [16, 256])
def test_step_state(block_size: int) -> None:
    checks.check_step_state(decode_inputs.decode_inputs, "cpu", block_size)
