"""Operands that a kernel would misread are refused before it is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton import (
    activation,
    decode_attention,
    norm,
    rope_cache,
    sampling,
)
from asyncllm.gpu.ops.triton.tuning import decode_tiles
from tests.step_inputs import draw_scalars
from tests.triton.launches import recording
from tests.triton.paged import attend_decodes

TOKENS = 6
HALF = torch.ones(8)
LINES = torch.arange(TOKENS)


def gaps(*shape: int) -> Tensor:
    """Every other element of a wider tensor."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


def attend(q: Tensor, out: Tensor, cache: Tensor) -> None:
    rows = torch.zeros(TOKENS, dtype=torch.int64), torch.ones(TOKENS, dtype=torch.int32)
    table = torch.zeros((2, 5), dtype=torch.int32)
    attend_decodes(
        decode_attention, q, cache, table, *rows, scale=1.0, out=out, tiles=decode_tiles(90, 16, 4)
    )


def strided(shape: tuple[int, ...], *strides: int) -> Tensor:
    return torch.empty_strided(shape, strides, device="meta")


Q, CACHE = torch.zeros(TOKENS, 4, 16), torch.zeros(2, 4, 16, 2, 16)
SPREAD = strided((2, 4, 16, 2, 16), 1, 2, 8, 128, 2**27)


@pytest.mark.parametrize(
    ("q", "out", "cache", "words"),
    [
        (gaps(TOKENS, 4, 16), Q, CACHE, "q has strides .*: expected contiguous heads"),
        (Q, gaps(TOKENS, 4, 16), CACHE, "out has strides .*: expected contiguous heads"),
        (strided((TOKENS, 4, 16), 16, 2**29, 1), Q, CACHE, "q has heads 536870912 elements apart"),
        (Q, Q, SPREAD, "elements of a head 134217728 apart"),
    ],
)
def test_heads_with_gaps_and_offsets_beyond_32_bits(
    q: Tensor, out: Tensor, cache: Tensor, words: str
) -> None:
    """Kernels count heads of a row, and elements of a head, in 32 bits; all else in 64."""
    with pytest.raises(ValueError, match=words):
        attend(q, out, cache)


def test_a_cache_beyond_32_bits() -> None:
    rope = rope_cache.TritonRopeAndCache(AttentionShape(4, 2, 16, 1.0), None, None, 1e-6)
    with pytest.raises(ValueError, match="elements of a head 134217728 apart"):
        rope(torch.zeros(TOKENS, 128), (torch.zeros(9, 16), LINES), SPREAD, LINES)


def test_shares_of_more_rows_than_lines_of_the_table() -> None:
    """Several rows may go on from one line; each of them has its share."""
    rows = torch.zeros(9, dtype=torch.int64), torch.ones(9, dtype=torch.int32)
    table = torch.zeros((2, 5), dtype=torch.int32)
    with recording() as launches:
        attend_decodes(
            decode_attention, torch.zeros(9, 4, 16), torch.zeros(2, 4, 16, 2, 16), table, *rows,
            scale=1.0, extra_splits=2, tiles=decode_tiles(90, 16, 4),
        )  # fmt: skip
    assert [each.arguments["MAX_ROWS"] for each in launches] == [16, 16]


def sample(logits: Tensor) -> None:
    zeros = torch.zeros(TOKENS + 1)
    parameters = draw_scalars(LINES, zeros, zeros.int(), zeros, zeros)
    sampling.sample(logits, parameters, LINES, LINES, LINES.clone(), LINES.clone())


def rotate(qkv: Tensor) -> None:
    rope = rope_cache.TritonRopeAndCache(AttentionShape(2, 1, 2, 1.0), None, None, 1e-6)
    rope(qkv, (torch.zeros(9, 2), LINES), torch.zeros(2, 1, 16, 1, 2), LINES)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (norm.TritonRMSNorm(HALF, 1e-6), "x"),
        (lambda x: norm.TritonRMSNorm(HALF, 1e-6).add(torch.zeros(TOKENS, 8), x), "residual"),
        (activation.silu_mul, "gate"),
        (lambda x: activation.gelu_mul(torch.zeros(TOKENS, 8), x), "up"),
        (lambda x: activation.sigmoid_mul(x, x), "gate"),
        (lambda x: activation.softcap(x, 3.0), "x"),
        (norm.TritonGatedNorm(HALF[:4], 1e-6), "x"),
        (sample, "logits"),
        (rotate, "qkv"),
    ],
)
def test_rows_with_gaps(run: Callable[..., Any], name: str) -> None:
    x = gaps(TOKENS, 8)
    with pytest.raises(ValueError, match=f"{name} has strides .16, 2.: expected contiguous rows"):
        run(*(x, x) if isinstance(run, norm.TritonGatedNorm) else (x,))


def test_rows_of_another_length_than_the_weight() -> None:
    with pytest.raises(ValueError, match="rows of 12 elements: expected 8"):
        norm.TritonRMSNorm(HALF, 1e-6)(torch.zeros(TOKENS, 12))
