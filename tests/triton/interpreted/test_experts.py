"""Experts against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from asyncllm.gpu.ops.triton import experts
from tests.triton.checks import check_experts

CASES = [
    {"tokens": 1},
    {"tokens": 9, "gelu": True},
    {"tokens": 9, "clamped": True, "biased": True},
    {"tokens": 9, "biased": True, "dtype": torch.float16},
    # Tiles of 64 rows, full ones and others.
    {"tokens": 70, "count": 4},
    {"tokens": 20, "count": 5, "clamped": True, "dtype": torch.float32},
    {"tokens": 60, "count": 4, "biased": True, "dtype": torch.float32},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts(case: dict) -> None:
    check_experts(experts, "cpu", **case)


def test_pairs_are_sorted_by_expert_and_their_tiles_counted() -> None:
    ids = torch.tensor([[3, 0], [0, 4], [3, 1], [3, 0], [3, 5]], dtype=torch.int32)
    pairs, starts, tile_ends = experts.sort_pairs(ids, 7, 3)
    assert pairs.tolist() == [1, 2, 7, 5, 0, 4, 6, 8, 3, 9]
    assert starts.tolist() == [0, 3, 4, 4, 8, 9, 10, 10]
    assert tile_ends.tolist() == [1, 2, 2, 4, 5, 6, 6]
