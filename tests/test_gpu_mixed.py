"""The mixed stage of the GPU benchmarks on the CPU. No time is asserted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.mixed import MixedBench, MixedPlan, step_times
from benchmarks.gpu.probe import StepRecord
from benchmarks.gpu.traffic import poisson_arrivals, run_traffic
from tests.gpu_stand_ins import HostClock, figures, make_stage, tiny_plan


def test_arrivals_are_those_of_the_rate_and_the_seed() -> None:
    found = poisson_arrivals(50.0, 100.0, shortest=3, longest=9, highest_token=7)
    assert found.times == sorted(found.times)
    assert 4700 < len(found.times) < 5300
    assert 0 < found.times[0] < found.times[-1] < 100.0
    assert len(found.times) == len(found.work.prompts) == len(found.work.max_tokens)
    assert {len(prompt) for prompt in found.work.prompts} == set(range(3, 10))
    assert found == poisson_arrivals(50.0, 100.0, shortest=3, longest=9, highest_token=7)
    assert found != poisson_arrivals(50.0, 100.0, shortest=3, longest=9, highest_token=7, seed=1)
    assert poisson_arrivals(1e-9, 0.5).times == [0.5]


def test_every_request_is_submitted_and_read() -> None:
    arrivals = poisson_arrivals(200.0, 0.1, shortest=2, longest=4)
    seen = []

    async def submit(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        seen.append((tuple(prompt), max_tokens))
        yield 1
        yield max_tokens - 1

    times = asyncio.run(run_traffic(submit, arrivals))
    work = arrivals.work
    expected = zip(map(tuple, work.prompts), work.max_tokens, strict=True)
    assert sorted(seen) == sorted(expected)
    assert times.tokens == work.num_output_tokens
    assert len(times.firsts) == len(times.between) == len(arrivals.times)
    assert min(times.firsts + times.between + times.lags) >= 0
    assert times.seconds > 0


def test_steps_are_timed_from_their_launch_or_the_step_before() -> None:
    def record(rows: int, tokens: int, launched: float, returned: float) -> StepRecord:
        return StepRecord(rows, tokens, 0, returned, 0.0, launched)

    records = [
        record(2, 9, launched=1.0, returned=3.0),
        record(2, 2, launched=2.0, returned=4.0),  # behind the first
        record(0, 0, launched=5.0, returned=6.0),
        record(3, 3, launched=8.0, returned=9.5),  # nothing was running
    ]
    assert step_times(records) == {"mixed": [2.0], "decode": [1.0, 1.5]}


def tiny_mixed(**changes: Any) -> MixedPlan:
    return MixedPlan(tiny_plan(), rates=(30.0, 60.0), seconds=0.3, lengths=(4, 20), **changes)


def test_mixed_traffic_on_the_cpu(tmp_path: Path) -> None:
    stage = make_stage()
    asyncio.run(MixedBench(stage, HostClock(), tiny_mixed(), tmp_path).run())
    assert (stage.failed, stage.skipped) == ([], [])
    found = figures(stage)
    for rate in (30, 60):
        for figure in (
            "output", "time to first token", "time between tokens", "time between tokens, p99",
            "decode steps", "mixed steps", "mixed steps, p99", "loop lag, p99",
        ):  # fmt: skip
            assert found[f"{rate} requests a second, {figure}"] > 0, figure
    assert [score.name for score, _ in stage.scores.scores] == [
        f"{rate} requests a second, loop lag, p99" for rate in (30, 60)
    ]
