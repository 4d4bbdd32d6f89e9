"""Experts against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from asyncllm.gpu.ops.routing import TorchRouting
from asyncllm.gpu.ops.triton import expert_pairs
from asyncllm.gpu.ops.triton.op_set import TritonOps
from tests.exact_experts import ROUTINGS, router_weights
from tests.slow import slow_but
from tests.triton.checks import (
    check_experts,
    check_routing,
    check_routing_ties,
    check_routing_without_numbers,
    check_sort_pairs,
    check_sum_experts,
)

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


@pytest.mark.parametrize("case", slow_but(CASES, *CASES[:3], CASES[-1]), ids=str)
def test_experts(case: dict) -> None:
    check_experts(TritonOps(), "cpu", **case)


@pytest.mark.parametrize("tokens", [5, expert_pairs.BLOCK_PAIRS // 3 + 50])
def test_pairs_of_one_block_and_of_more(tokens: int) -> None:
    check_sort_pairs(expert_pairs, tokens, 5, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sum(dtype: torch.dtype) -> None:
    check_sum_experts(expert_pairs, dtype, "cpu")


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "groups"])
def test_routing(name: str) -> None:
    check_routing(TritonOps(), ROUTINGS[name], "cpu")


def test_groups_are_left_to_torch() -> None:
    config = ROUTINGS["groups"]
    assert type(TritonOps().routing(config, router_weights(config))) is TorchRouting


def test_rows_that_are_no_numbers_have_experts() -> None:
    check_routing_without_numbers(TritonOps(), "correction")
    check_routing_ties(TritonOps())
