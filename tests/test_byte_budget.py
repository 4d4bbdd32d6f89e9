"""ByteBudget: the order of claims."""

from __future__ import annotations

import pytest

from asyncllm.serving import byte_budget
from asyncllm.serving.byte_budget import (
    LARGE_CLAIM_DELAY_BYTES_PER_SECOND,
    MAX_RATE_CHECKS,
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


def test_owners_have_turns(clock):
    budget, granted, claims = ByteBudget(30), [], {}

    def claim(name: str, num_bytes: int = 10):
        claims[name] = budget.claim(num_bytes, lambda: granted.append(name), name[0])

    for name in ("a0", "a1", "a2", "a3", "a4", "a5"):
        claim(name)
    for name in ("b0", "b1", "c0"):
        clock.now += 1.0
        claim(name)
    for name in ("a0", "a1", "a2", "b0"):
        claims[name].release()
    # "b" and "c" had none granted; of "a" and "b" then, the one that waited longer was next.
    assert granted == ["a0", "a1", "a2", "b0", "c0", "a3", "b1"]
    claim("d0", 30)
    for name in ("b1", "c0"):
        claims[name].release()
    assert (granted[7:], budget.num_waiting) == ([], 3)  # None passes the whole budget of "d".
    for name in ("a3", "a4", "d0", "a5"):
        claims[name].release()
    assert (granted[7:], budget.num_waiting) == (["a4", "d0", "a5"], 0)
    assert not budget._lines._num_running


def test_only_a_blocking_claim_is_too_slow(clock):
    budget = ByteBudget(10)
    held = budget.claim(10, lambda: None)
    assert not held.is_too_slow(0)
    clock.now = 100.0
    assert not held.is_too_slow(0)  # None waits.
    assert held.seconds_until_check == RATE_CHECK_SECONDS
    clock.now += RATE_CHECK_SECONDS - 0.5
    waiting = budget.claim(1, lambda: None)
    clock.now += 0.5
    assert not held.is_too_slow(0)  # Others began to wait a moment ago.
    clock.now += RATE_CHECK_SECONDS - 0.5
    assert not held.is_too_slow(0)
    assert held.seconds_until_check == 0.5
    clock.now += 0.5
    assert not held.is_too_slow(MIN_BYTES_PER_RATE_CHECK)
    clock.now += RATE_CHECK_SECONDS
    assert held.is_too_slow(2 * MIN_BYTES_PER_RATE_CHECK - 1)
    waiting.release()
    clock.now += RATE_CHECK_SECONDS
    assert not held.is_too_slow(2 * MIN_BYTES_PER_RATE_CHECK)
    clock.now += 0.5
    budget.claim(1, lambda: None)
    clock.now += RATE_CHECK_SECONDS
    assert not held.is_too_slow(2 * MIN_BYTES_PER_RATE_CHECK)
    clock.now += RATE_CHECK_SECONDS
    assert held.is_too_slow(2 * MIN_BYTES_PER_RATE_CHECK)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_large_claim_is_received_in_as_many_checks_as_a_small_one(clock, is_in_time):
    num_bytes = 4 << 20
    budget = ByteBudget(num_bytes)
    held = budget.claim(num_bytes, lambda: None)
    assert held.min_bytes_per_check == 1 << 20
    waiting, num_received = budget.claim(70_000, lambda: None), 0
    assert waiting.min_bytes_per_check == MIN_BYTES_PER_RATE_CHECK
    clock.now += 0.5
    assert not held.is_too_slow(num_received)
    for _ in range(MAX_RATE_CHECKS):
        clock.now += RATE_CHECK_SECONDS
        num_received += (1 << 20) - (not is_in_time)
        assert held.is_too_slow(num_received) == (not is_in_time)
    assert (num_received == num_bytes) == is_in_time


def test_a_client_whose_bytes_wait_to_be_parsed_is_not_slow_until_the_last_check(clock):
    """So a body of tiny chunks, which waits for parse turns for as long as it lasts, does not hold
    its bytes for longer than others."""
    budget = ByteBudget(100)
    held = budget.claim(100, lambda: None)
    waiting = budget.claim(1, lambda: None)
    assert not held.is_too_slow(0)
    for _ in range(MAX_RATE_CHECKS - 1):
        clock.now += RATE_CHECK_SECONDS
        assert not held.is_too_slow(0, is_backlogged=True)
    waiting.release()  # The checks begin anew when others wait again.
    clock.now += RATE_CHECK_SECONDS
    budget.claim(1, lambda: None)
    assert not held.is_too_slow(0, is_backlogged=True)
    for _ in range(MAX_RATE_CHECKS - 1):
        clock.now += RATE_CHECK_SECONDS
        assert not held.is_too_slow(0, is_backlogged=True)
    clock.now += RATE_CHECK_SECONDS
    assert held.is_too_slow(100, is_backlogged=True)


@pytest.mark.parametrize("num_received", [0, MIN_BYTES_PER_RATE_CHECK])
def test_a_client_that_was_spared_owes_the_bytes(clock, num_received):
    budget = ByteBudget(100)
    held = budget.claim(100, lambda: None)
    budget.claim(1, lambda: None)
    assert not held.is_too_slow(0)
    clock.now += RATE_CHECK_SECONDS
    assert not held.is_too_slow(0, is_backlogged=True)
    clock.now += RATE_CHECK_SECONDS
    assert held.is_too_slow(num_received)
    clock.now += RATE_CHECK_SECONDS
    assert not held.is_too_slow(3 * MIN_BYTES_PER_RATE_CHECK)
