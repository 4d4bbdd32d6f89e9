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
    gated_norm,
    merge_attention,
    norm,
    prefill_attention,
    rope_cache,
    sampling,
)
from asyncllm.gpu.ops.triton.tuning import decode_tiles, prefill_tiles
from tests.step_inputs import draw_scalars
from tests.triton.launches import recording

ROWS, TOKENS = 3, 6
HALF = torch.ones(8)
LINES = torch.arange(TOKENS)


def gaps(*shape: int) -> Tensor:
    """Every other element of a wider tensor."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


def apart(x: Tensor) -> Tensor:
    """The same numbers with a gap behind each."""
    return torch.stack((x, x), -1)[..., 0]


def decode(**changed: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "q": torch.zeros(ROWS, 4, 16),
        "cache": torch.zeros(2, 4, 16, 2, 16),
        "block_table": torch.zeros((2, 5), dtype=torch.int32),
        "table_rows": torch.zeros(ROWS, dtype=torch.int64),
        "seq_lens": torch.ones(ROWS, dtype=torch.int32),
        "scale": 1.0,
        "tiles": decode_tiles(90, 16, 4),
    }
    return decode_attention.decode_attention(**arguments | changed)


def prefill(**changed: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "q": torch.zeros(TOKENS, 4, 16),
        "cache": torch.zeros(2, 4, 16, 2, 16),
        "block_table": torch.zeros((2, 5), dtype=torch.int32),
        "table_rows": torch.zeros(ROWS, dtype=torch.int64),
        "seq_lens": torch.full((ROWS,), 2, dtype=torch.int32),
        "query_start_loc": torch.arange(0, 7, 2),
        "scale": 1.0,
        "tiles": prefill_tiles(90, 16, 4),
    }
    return prefill_attention.prefill_attention(**arguments | changed)


@pytest.mark.parametrize("attend", [decode, prefill])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": gaps(TOKENS, 4, 16)}, "q has strides .*: expected contiguous heads"),
        ({"q": torch.zeros(TOKENS, 3, 16)}, "3 heads: expected a multiple of the cache's 2"),
        ({"q": torch.zeros(TOKENS, 4, 32)}, "expected heads of one size"),
        ({"out": gaps(TOKENS, 4, 16)}, "out has strides .*: expected contiguous heads"),
        ({"out": torch.zeros(1, 4, 16)}, "and out like q"),
        ({"block_table": apart(torch.zeros((2, 5)).int())}, "block_table has strides"),
        ({"table_rows": torch.zeros(2)}, r"table_rows has shape \(2,\).*expected \(3,\)"),
        ({"seq_lens": apart(torch.ones(ROWS).int())}, r"\(3,\) without gaps"),
        ({"splits": 0}, "splits=0: expected at least 1"),
        ({"window": 0}, "window=0: expected at least 1"),
        (
            {"splits": 3, "workspace": torch.zeros(5)},
            "a workspace of 5 elements: expected at least",
        ),
    ],
)
def test_attention(attend: Callable[..., Tensor], changed: dict[str, Any], message: str) -> None:
    if attend is decode:
        cut = {name: changed[name][:ROWS] for name in ("q", "out") if name in changed}
        changed = changed | cut
    with pytest.raises(ValueError, match=message):
        attend(**changed)


@pytest.mark.parametrize("attend", [decode, prefill])
def test_offsets_beyond_32_bits(attend: Callable[..., Tensor]) -> None:
    """Kernels count heads of a row, and elements of a head, in 32 bits; all else in 64."""
    rows = ROWS if attend is decode else TOKENS
    heads = torch.empty_strided((rows, 4, 16), (16, 2**29, 1), device="meta")
    with pytest.raises(ValueError, match="q has heads 536870912 elements apart"):
        attend(q=heads, out=torch.zeros(rows, 4, 16))
    spread = torch.empty_strided((2, 4, 16, 2, 16), (1, 2, 8, 128, 2**27), device="meta")
    with pytest.raises(ValueError, match="elements of a head 134217728 apart"):
        attend(cache=spread)
    rope = rope_cache.TritonRopeAndCache(AttentionShape(4, 2, 16, 1.0), None, None, 1e-6)
    with pytest.raises(ValueError, match="elements of a head 134217728 apart"):
        rope(torch.zeros(TOKENS, 128), (torch.zeros(9, 16), LINES), spread, LINES)


def test_starts_of_prefills() -> None:
    with pytest.raises(ValueError, match=r"query_start_loc has shape \(3,\).*expected \(4,\)"):
        prefill(query_start_loc=torch.arange(3))


def test_shares_of_more_rows_than_lines_of_the_table() -> None:
    """Several rows may go on from one line; each of them has its share."""
    rows = {"q": torch.zeros(9, 4, 16), "table_rows": torch.zeros(9, dtype=torch.int64)}
    with recording(decode_attention) as launches, recording(merge_attention) as merges:
        decode(**rows, seq_lens=torch.ones(9, dtype=torch.int32), extra_shares=2)
    assert [each.arguments["LINES"] for each in (*launches, *merges)] == [16, 16]


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
        (lambda x: activation.sigmoid_mul(x, x), "x"),
        (lambda x: activation.softcap(x, 3.0), "x"),
        (gated_norm.TritonGatedNorm(HALF[:4], 1e-6), "x"),
        (sample, "logits"),
        (rotate, "qkv"),
    ],
)
def test_rows_with_gaps(run: Callable[..., Any], name: str) -> None:
    x = gaps(TOKENS, 8)
    with pytest.raises(ValueError, match=f"{name} has strides .16, 2.: expected contiguous rows"):
        run(*(x, x) if isinstance(run, gated_norm.TritonGatedNorm) else (x,))


def test_rows_of_another_length_than_the_weight() -> None:
    with pytest.raises(ValueError, match="rows of 12 elements: expected 8"):
        norm.TritonRMSNorm(HALF, 1e-6)(torch.zeros(TOKENS, 12))
