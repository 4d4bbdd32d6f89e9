"""Sampling as a race, in plain torch: the distribution, the truncation, the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.gpu.ops.gumbel import gumbel_keys, gumbel_sample, vocab_exponentials


def philox(counter: int, key: int) -> list[int]:
    """Philox4x32-10 in Python integers."""
    words, keys = [counter, 0, 0, 0], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        high0, low0 = divmod(words[0] * 0xD2511F53, 1 << 32)
        high2, low2 = divmod(words[2] * 0xCD9E8D57, 1 << 32)
        words = [high2 ^ words[1] ^ keys[0], low2, high0 ^ words[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) % (1 << 32), (keys[1] + 0xBB67AE85) % (1 << 32)]
    return words


def splitmix(state: int, count: int) -> int:
    """Output number ``count`` of SplitMix64, in Python integers."""
    mask = 2**64 - 1
    z = (state + (count + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def rows(logits: torch.Tensor, count: int, **parameters: float) -> list[torch.Tensor]:
    """``count`` draws of one row: at as many positions."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters
    return [
        logits.expand(count, -1),
        torch.full((count,), 1234567),
        torch.arange(count),
        *(torch.full((count,), value) for value in values.values()),
    ]


def draws(logits: torch.Tensor, count: int = 20_000, **parameters: float) -> np.ndarray:
    found = gumbel_sample(*rows(logits, count, **parameters))
    return np.bincount(found.numpy(), minlength=len(logits))


def test_philox_matches_its_published_vectors() -> None:
    """From the known-answer tests of Random123."""
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_the_noise_is_philox_keyed_by_splitmix() -> None:
    states = torch.tensor([0, -1, 2**62 + 12345])
    positions = torch.tensor([0, 7, 100_000])
    keys = gumbel_keys(states, positions)
    noise = vocab_exponentials(keys, 3000).double()
    for row in range(3):
        key = splitmix(int(states[row]) % 2**64, int(positions[row]))
        assert int(keys[row]) % 2**64 == key
        for token in (0, 255, 256, 1023, 1024, 2999):
            word = philox(token // 1024 * 256 + token % 256, key)[token // 256 % 4]
            expected = -np.log1p(-(word + 0.5) / 2**32)
            assert float(noise[row, token]) == pytest.approx(expected, rel=3e-6)


def test_exponentials_have_their_distribution() -> None:
    keys = gumbel_keys(torch.arange(8), torch.zeros(8))
    noise = np.sort(vocab_exponentials(keys, 50_000).numpy().ravel().astype(np.float64))
    steps = np.arange(1, len(noise) + 1) / len(noise)
    distance = np.abs(-np.expm1(-noise) - steps).max()
    assert distance < 1.95 / np.sqrt(len(noise))  # Kolmogorov-Smirnov at 0.1 %


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 0.5, -2.0, -torch.inf])
    expected = 20_000 * torch.softmax(logits / 0.8, 0).double().numpy()
    counts = draws(logits, temperature=0.8)
    assert counts[5] == 0
    squares = (counts[:5] - expected[:5]) ** 2 / expected[:5]
    assert squares.sum() < 18.5  # chi-square with 4 degrees of freedom at 0.1 %


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.9}, [0, 1, 3]),
        ({"min_p": 0.3}, [0, 1]),
        # The first two hold 0.73 and 0.27 of their own mass.
        ({"top_k": 2, "top_p": 0.7}, [0]),
        ({"top_k": 2, "top_p": 0.75}, [0, 1]),
        ({"temperature": 0.0}, [0]),
    ],
)
def test_truncation(parameters: dict[str, float], kept: list[int]) -> None:
    counts = draws(torch.tensor([2.0, 1.0, 0.0, 0.5, -2.0]), 3000, **parameters)
    assert np.flatnonzero(counts).tolist() == kept


def test_exactly_k_tokens_are_kept_where_logits_tie() -> None:
    counts = draws(torch.zeros(10), 2000, top_k=4)
    assert np.flatnonzero(counts).tolist() == [0, 1, 2, 3]


def test_a_small_change_of_the_logits_changes_few_tokens() -> None:
    random = torch.Generator().manual_seed(0)
    arguments = rows(torch.randn(2000, generator=random), 2000)
    before = gumbel_sample(*arguments)
    arguments[0] = arguments[0] + 1e-3 * torch.randn(2000, 2000, generator=random)
    assert (gumbel_sample(*arguments) != before).sum() < 20
