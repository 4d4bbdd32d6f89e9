"""TokenRate: the rate at which steps take further tokens."""

from __future__ import annotations

import pytest

from asyncllm.core.token_rate import TokenRate


def rate_of(*steps):
    rate = TokenRate()
    for num_tokens, seconds in steps:
        rate.add(num_tokens, seconds)
    return rate.tokens_per_second


def test_a_step_has_a_time_of_its_own():
    """10 ms, and 1 ms for each ten tokens."""
    steps = [(n, 0.01 + n * 1e-4) for n in (4, 100, 4, 2000, 37)]
    assert rate_of(*steps) == pytest.approx(10_000)
    assert rate_of(*steps[:2]) == pytest.approx(10_000)


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        ([], 0.0),
        ([(5, 0.0)], 0.0),
        ([(100, 0.5)], 200.0),
        ([(100, 0.5)] * 50, 200.0),
        # Larger steps that take no longer tell nothing.
        ([(10, 0.5), (100, 0.5)], 110.0),
        ([(10, 0.6), (100, 0.4)], 110.0),
    ],
)
def test_steps_that_tell_nothing_of_a_token(steps, rate):
    assert rate_of(*steps) == pytest.approx(rate, rel=0.1)


def test_later_steps_count_more():
    slow = [(n, 0.01 + n * 1e-3) for n in (10, 1000)] * 10
    fast = [(n, 0.01 + n * 1e-4) for n in (10, 1000)] * 200
    assert rate_of(*slow) == pytest.approx(1000)
    assert rate_of(*slow, *fast[:40]) < 4000
    assert rate_of(*slow, *fast) == pytest.approx(10_000, rel=0.2)
