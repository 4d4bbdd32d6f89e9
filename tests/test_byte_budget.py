"""ByteBudget: the order of claims."""

from __future__ import annotations

import pytest

from asyncllm.serving import byte_budget
from asyncllm.serving.byte_budget import (
    LARGE_CLAIM_DELAY_BYTES_PER_SECOND,
    MIN_BYTES_PER_RATE_CHECK,
    RATE_CHECK_SECONDS,
    ByteBudget,
)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(byte_budget.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_small_claim_passes_slightly_earlier_large_one(clock):
    budget, granted = ByteBudget(4 * LARGE_CLAIM_DELAY_BYTES_PER_SECOND), []

    def claim(name: str, seconds: float):
        return budget.claim(
            int(seconds * LARGE_CLAIM_DELAY_BYTES_PER_SECOND), lambda: granted.append(name)
        )

    first = claim("first", 4)
    large = claim("large", 4)
    clock.now = 2.5
    small = claim("small", 1)
    late = claim("late", 2)
    assert (granted, budget.num_waiting) == (["first"], 3)
    first.release()
    assert granted == ["first", "small"]  # 3.5 s against 4 s; the large one does not fit beside it.
    small.release()
    assert granted == ["first", "small", "large"]
    large.release()
    assert (granted[-1], budget.num_waiting) == ("late", 0)
    late.release()
    late.release()
    assert claim("whole", 9).num_bytes == 4 * LARGE_CLAIM_DELAY_BYTES_PER_SECOND
    assert granted[-1] == "whole"


def test_a_claim_that_stops_waiting_leaves_no_trace(clock):
    budget, granted = ByteBudget(10), []
    held = budget.claim(10, lambda: granted.append("held"))
    gone = budget.claim(5, lambda: granted.append("gone"))
    budget.claim(7, lambda: granted.append("last"))
    gone.release()
    assert budget.num_waiting == 1
    held.release()
    assert (granted, budget.num_waiting) == (["held", "last"], 0)


def test_only_a_blocking_claim_is_too_slow(clock):
    budget = ByteBudget(10)
    held = budget.claim(10, lambda: None)
    assert not held.is_too_slow(0)
    clock.now = 100.0
    assert not held.is_too_slow(0)  # None waits.
    waiting = budget.claim(1, lambda: None)
    clock.now += RATE_CHECK_SECONDS - 0.1
    assert not held.is_too_slow(0)
    clock.now += 0.1
    assert not held.is_too_slow(MIN_BYTES_PER_RATE_CHECK)
    clock.now += RATE_CHECK_SECONDS
    assert held.is_too_slow(2 * MIN_BYTES_PER_RATE_CHECK - 1)
    waiting.release()
    clock.now += RATE_CHECK_SECONDS
    assert not held.is_too_slow(2 * MIN_BYTES_PER_RATE_CHECK)
