"""Sampling as a race, in plain torch: the noise. ``tests/test_sampler.py`` has the draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.gpu.ops.gumbel import gumbel_keys, gumbel_sample, vocab_exponential_noise


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


def test_philox_matches_its_published_vectors() -> None:
    """From the known-answer tests of Random123."""
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_the_noise_is_philox_keyed_by_splitmix() -> None:
    states = torch.tensor([0, -1, 2**62 + 12345])
    positions = torch.tensor([0, 7, 100_000])
    keys = gumbel_keys(states, positions)
    noise = vocab_exponential_noise(keys, 3000).double()
    for row in range(3):
        key = splitmix(int(states[row]) % 2**64, int(positions[row]))
        assert int(keys[row]) % 2**64 == key
        for token in (0, 255, 256, 1023, 1024, 2999):
            word = philox(token // 1024 * 256 + token % 256, key)[token // 256 % 4]
            expected = -np.log1p(-(word + 0.5) / 2**32)
            assert float(noise[row, token]) == pytest.approx(expected, rel=3e-6)


def test_a_small_change_of_the_logits_changes_few_tokens() -> None:
    random, count = torch.Generator().manual_seed(0), 1000
    row, change = torch.randn(count, generator=random), torch.randn(count, count, generator=random)
    states, positions, ones = torch.full((count,), 1234567), torch.arange(count), torch.ones(count)
    before, after = (
        gumbel_sample(logits, states, positions, ones, ones.int() * 0, ones, ones * 0)
        for logits in (row.expand(count, -1), row + 1e-3 * change)
    )
    assert (before != after).sum() < 10
