"""The comparison with the reference: tolerance of noise alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm.outputs import Logprob, TokenLogprobs
from tests.families import make
from tests.reference import MARGIN, Expected, Tally, check_tokens, compare, generate, score

NOISE = 1e-5
ROWS = torch.tensor([[0.0, -1.0, -2.0], [-2.0, 0.0, -1e-5], [-3.0, -1.0, 0.0]]).double()
EXPECTED = Expected([0, 1, 2], ROWS, NOISE)
"""Its second token is a tie."""


def outputs(tokens: list[int], wrong: float = 0.0) -> Any:
    """A sequence whose third log-probability is wrong by so much."""
    logprobs = []
    for index, (row, token) in enumerate(zip(ROWS, tokens, strict=True)):
        value = float(row[token]) + wrong * (index == 2)
        logprobs.append(TokenLogprobs(Logprob(token, value, 1), ()))
    return SimpleNamespace(error=None, outputs=tokens, logprobs=logprobs, max_tokens=3)


def test_log_probabilities_are_compared_in_units_of_noise():
    tally = Tally()
    compare(outputs([0, 1, 2], wrong=0.9 * MARGIN * NOISE), EXPECTED, tally)
    assert (tally.tokens, tally.ties) == (3, set())
    with pytest.raises(AssertionError):
        compare(outputs([0, 1, 2], wrong=1.1 * MARGIN * NOISE), EXPECTED, Tally())


def test_tokens_part_at_ties_alone():
    assert EXPECTED.num_ties == 1
    assert check_tokens([0, 1, 2], EXPECTED) == 3
    assert check_tokens([0, 2, 0], EXPECTED) == 1
    assert check_tokens([0, 1], EXPECTED.first(2)) == 2
    for wrong in ([1, 1, 2], [0, 0, 2], [0, 1, 1]):
        with pytest.raises(AssertionError, match="expected"):
            check_tokens(wrong, EXPECTED)
    with pytest.raises(ValueError, match="longer"):
        check_tokens([0, 1], EXPECTED)


def test_tie_counts_once_for_all_outputs():
    tally = Tally()
    for _ in range(2):
        compare(outputs([0, 2, 0]), EXPECTED, tally)
    assert (tally.tokens, tally.ties) == (4, {(0, 1)})


def test_the_reference_is_in_float64(tmp_path):
    model = make(tmp_path, "Llama")
    expected = generate(model, [5, 6, 7], 8)
    exact, noise = score(model, [5, 6, 7, *expected.tokens])
    assert 1e-7 < noise == expected.noise < 1e-4
    assert float((exact[2:-1] - expected.logprobs).abs().max()) < noise
    assert exact[2:-1].argmax(-1).tolist() == expected.tokens
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_noise_that_might_hide_a_mistake_is_refused(tmp_path):
    """As of a processor that multiplies matrices in bfloat16."""
    model = make(tmp_path, "Llama")

    def rounded(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output.bfloat16().float() if output.dtype == torch.float32 else output

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(rounded)
    with pytest.raises(AssertionError):
        score(model, [5, 6, 7])
