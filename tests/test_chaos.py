"""Short chaotic runs from a printed seed."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.chaos.run import demo_subject, fake_subject, fatal, run
from tests.slow import slow_but


@pytest.fixture
def seed():
    seed = random.SystemRandom().getrandbits(32)
    print(f"python -m benchmarks.chaos --seed {seed}")
    return seed


@pytest.mark.parametrize("seconds", slow_but([2.5, 10.0], 2.5))
@pytest.mark.parametrize("make", slow_but([fake_subject, demo_subject], fake_subject))
def test_chaos(make, seconds, seed):
    outcome = asyncio.run(run(make(), seconds=seconds, seed=seed, clients=30))
    assert outcome.ledger.wrong == []
    counts = outcome.ledger.outcomes
    cancelled = sum(n for name, n in counts.items() if name.startswith("cancelled"))
    finished = sum(n for name, n in counts.items() if name.startswith("finished"))
    print(counts)
    assert finished > 10
    assert cancelled > 10
    assert outcome.stats.num_preemptions > 0
    assert outcome.stats.num_aborted > 0


def test_the_ledger_sees_a_wrong_token(seed, monkeypatch):
    from asyncllm.testing import FakeExecutor

    write = FakeExecutor._write_digests

    def wrong(self, group, req_index, start, tokens):
        return write(self, group, req_index, start, tokens) ^ (start % 7 == 3)

    monkeypatch.setattr(FakeExecutor, "_write_digests", wrong)
    outcome = asyncio.run(run(fake_subject(), seconds=2.0, seed=seed, clients=10))
    assert any("instead of" in what for what in outcome.ledger.wrong)


def test_a_device_that_dies(seed):
    assert asyncio.run(fatal(seed)) == []
