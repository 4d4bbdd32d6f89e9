"""The sampler against the plain function that it computes, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from asyncllm.gpu.ops.triton.sampling import sample
from tests.triton import checks


@pytest.mark.parametrize("vocab_size", [700, pytest.param(5003, marks=pytest.mark.slow)])
def test_equals_the_plain_function(vocab_size: int) -> None:
    checks.check_sampling(sample, checks.sampling_rows(20, vocab_size), "cpu")


def test_ties_of_bfloat16() -> None:
    logits, *parameters = checks.sampling_rows(20, 1300, seed=2)
    checks.check_sampling(sample, ((logits * 0.5).to(torch.bfloat16), *parameters), "cpu")


def test_odd_rows() -> None:
    checks.check_odd_rows(sample, "cpu")


def test_company_does_not_matter() -> None:
    checks.check_company(sample, "cpu")


def test_top_k() -> None:
    checks.check_top_k(sample, "cpu")
