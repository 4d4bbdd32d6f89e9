"""Paged attention against float64, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton import decode_attention, prefill_attention
from asyncllm.gpu.ops.triton.attention import TritonAttention
from tests.slow import slow_but
from tests.step_inputs import planned
from tests.triton.cases import DECODE, PREFILL, WIDE_DECODE, WIDE_PREFILL
from tests.triton.checks import check_decode, check_prefill
from tests.triton.paged import AttentionCase, assert_close, expected_rows, make_batch

KINDS = ("group4-splits", "window", "softcap", "sinks", "shares", "float32", "head512-splits")
KINDS += ("group1", "prefix", "empty-rows", "sinks-window", "splits", "head320", "heads-first-48")
KINDS += ("group7", "group24", "dims-before-slots", "many-decodes")
"""One of each feature, size of a head and layout of a cache, of decodes and of prefills."""


def some(cases: list[AttentionCase]) -> list[AttentionCase]:
    return [case for case in cases if str(case) in KINDS]


@pytest.mark.parametrize("case", slow_but(DECODE + WIDE_DECODE, *some(DECODE)), ids=str)
def test_decode(case: AttentionCase) -> None:
    check_decode(decode_attention, case, "cpu", 80)


@pytest.mark.parametrize("case", slow_but(PREFILL, *some(PREFILL)), ids=str)
def test_prefill(case: AttentionCase) -> None:
    check_prefill(prefill_attention, case, "cpu", 80)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("case", WIDE_PREFILL, ids=str)
def test_prefill_of_wide_heads(case: AttentionCase, capability: int) -> None:
    check_prefill(prefill_attention, case, "cpu", capability)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 1, 30), (25, 9)])
def test_backend(counts: tuple[int, ...], window: int | None) -> None:
    """Decodes and prefills of one step, from the host's arrays to the output."""
    lengths = tuple(90 + count for count in counts)
    case = AttentionCase("step", 4, 64, lengths, counts, window=window, dtype=torch.float16)
    batch = make_batch(case, "cpu")
    starts = np.array([0, *np.cumsum(counts)])
    # By request index, in another order than the rows.
    lines = np.array([4, 0, 3])[: len(counts)]
    table = np.full((6, batch.block_table.shape[1]), 2**30, dtype=np.int32)
    table[lines] = batch.block_table
    inputs = planned(table, lines, np.array(lengths) - np.array(counts), np.array(counts), 16)
    shape = AttentionShape(8, 2, 64, 0.125)
    attention = TritonAttention(shape, torch.float16, torch.device("cpu"), capability=80, num_sms=4)
    plan = attention.plan(inputs, window, 0)
    out = attention(batch.q, batch.q, batch.q, batch.cache, plan)
    found = out.view(-1, 8, 64)
    for row, expected in enumerate(expected_rows(case, batch)):
        assert_close(found[starts[row] : starts[row + 1]], expected, torch.float16, f"row {row}")
