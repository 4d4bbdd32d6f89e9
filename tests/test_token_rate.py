"""TokenRate: the rate at which steps take further tokens."""

from __future__ import annotations

import random

import pytest

from asyncllm.core.token_rate import TokenRate


def rate_of(*steps):
    rate = TokenRate()
    for num_tokens, seconds in steps:
        rate.add_step(num_tokens, seconds)
    return rate.tokens_per_second


def test_a_step_has_a_time_of_its_own():
    """10 ms, and 1 ms for each ten tokens."""
    steps = [(n, 0.01 + n * 1e-4) for n in (4, 100, 4, 2000, 37)]
    assert rate_of(*steps) == pytest.approx(10_000)
    assert rate_of(*steps[:3]) == pytest.approx(10_000)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [(5, 0.0)] * 5,
        [(100, 0.5)] * 50,
        # A line through two points has no error to judge it by.
        [(10, 0.01), (100, 0.02)],
        # Larger steps that take no longer tell nothing.
        [(10, 0.5), (100, 0.5), (50, 0.5)],
        [(10, 0.6), (100, 0.4), (50, 0.5)],
        [(10, 0.5), (100, 0.6), (50, 0.4), (20, 0.6)],
    ],
)
def test_steps_that_tell_nothing_of_a_token(steps):
    assert rate_of(*steps) == 0.0


def test_a_known_rate_is_about_right():
    """Times that vary by a fifth of their own."""
    draw = random.Random(1)

    def steps(seconds_per_token):
        sizes = [draw.choice((8, 16, 500)) for _ in range(200)]
        return [(n, (0.01 + n * seconds_per_token) * draw.uniform(0.8, 1.2)) for n in sizes]

    for _ in range(20):
        assert rate_of(*steps(1e-4)) == pytest.approx(10_000, rel=0.3)
        # Tokens that hardly take time: the rate is not known, or is a large one.
        found = rate_of(*steps(1e-9))
        assert found == 0.0 or found > 100_000


def test_later_steps_count_more():
    slow = [(n, 0.01 + n * 1e-3) for n in (10, 1000)] * 10
    fast = [(n, 0.01 + n * 1e-4) for n in (10, 1000)] * 200
    assert rate_of(*slow) == pytest.approx(1000)
    assert rate_of(*slow, *fast[:40]) < 4000
    assert rate_of(*slow, *fast) == pytest.approx(10_000, rel=0.2)
