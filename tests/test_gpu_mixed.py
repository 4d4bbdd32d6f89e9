"""The mixed stage of the GPU benchmarks on the CPU. No time is asserted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.mixed import MixedBench, MixedPlan, measure_peer, step_times
from benchmarks.gpu.peer_probes import PROBES
from benchmarks.gpu.probe import StepRecord
from benchmarks.gpu.traffic import TrafficTimes, poisson_arrivals, run_traffic
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


class Peer:
    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def run(self, name: str, seconds: float, options: Mapping[str, Any] | None = None) -> Any:
        assert options is not None
        assert (Path(options["model"]) / "config.json").exists()
        self.asked.append((name, dict(options)))
        return asdict(TrafficTimes([0.25], [0.5, 0.5], [0.001], tokens=30, seconds=2.0))


def test_a_peer_gets_the_same_requests() -> None:
    stage, peer, clock = make_stage(), Peer(), HostClock()
    plan = tiny_mixed()
    measure_peer(stage, clock, plan, "vllm", peer)
    assert clock.released == 1
    assert stage.failed == []
    for (name, options), rate in zip(peer.asked, plan.rates, strict=True):
        assert name == "vllm"
        assert options["arrivals"] == plan.arrivals(rate)
        assert poisson_arrivals(**options["arrivals"]) == poisson_arrivals(**plan.arrivals(rate))
        assert (options["max_model_len"], options["max_num_seqs"]) == (128, 4)
    found = figures(stage)
    assert found["vllm, 30 requests a second, output"] == 15.0
    assert found["vllm, 60 requests a second, time between tokens"] == 0.5
    assert set(PROBES) == {"vllm"}
