"""Benchmarks that take seconds, run as a person runs them: figures, memory after rounds of traffic,
and the parts of a cold start."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import cold_start, peer_checkpoint
from benchmarks.cold_process import Parts
from benchmarks.common import Report
from tests.processes import python
from tests.slow import slow_but

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", slow_but(["groups", "parsing", "routing", "scheduler"], "parsing"))
def test_quick_run_writes_its_figures(name: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = python("-m", f"benchmarks.{name}", "--quick", f"--json={file}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    assert len(figures) > 3
    assert figures[0]["name"] in done.stdout
    for figure in figures:
        assert figure["value"] > 0, figure


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_rounds_of_mixed_traffic_leave_nothing_behind(tmp_path):
    """In a process of its own, where other tests leave nothing."""
    file = tmp_path / "memory.json"
    command = ("-m", "benchmarks.memory", "--quick", f"--json={file}")
    done = python(*command, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    figures = defaultdict(list)
    for figure in json.loads(file.read_text(encoding="utf-8"))["figures"]:
        figures[figure["name"]].append(figure["value"])
    assert len(figures["closed"]) == 4
    assert figures["the last round, more than the first"][0] <= 20
    # oneDNN's primitives of four weight shapes for the 56 buckets up to 256 rows; without
    # buckets there are more than 300 MiB of them.
    assert figures["the last round, more than before the first"][0] <= 128
    # An object kept of each request would be 2,000 more a round, and 1,000 a half of one.
    assert figures["Python objects of the last, more than the first"][0] < 500
    assert max(figures["Python objects kept of the second half"]) < 500


def test_the_time_of_the_measurement_is_in_no_part(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.time", lambda: clock[0])
    parts = Parts(90.0)
    with parts.measured("outer"):
        clock[0] += 2.0
        with parts.measured("inner"):
            clock[0] += 1.0
            parts.excluded += 0.75
        with parts.measured("inner"):
            clock[0] += 0.5
    parts.end()
    assert parts.seconds["inner"] == 0.75
    assert parts.seconds["outer"] == 2.75
    assert parts.seconds["total"] == 12.75


def test_medians_are_of_all_rounds(capsys):
    report = Report("cold")
    cold_start.tell(report, "as it is", [{"total": value} for value in (3.0, 9.0, 4.0)])
    (figure,) = report.figures
    assert (figure.name, figure.value, figure.note) == ("total", 4.0, "3.00 to 9.00")


@pytest.mark.slow
@pytest.mark.parametrize("backed", [0, 4 << 20])
def test_the_parts_of_a_start_add_up(tmp_path, backed):
    checkpoint = peer_checkpoint.make(tmp_path, "tiny")
    found = cold_start.start(checkpoint, "float32", backed)
    assert set(found) == {
        "interpreter", "import asyncllm", "import torch", "other imports",
        "tokenizer, beside the weights", "weights", "weights, system CPU", "weights, own CPU",
        "calibration", "the rest of loading", "first token", "total",
        "checksums of the file", "total beyond import torch",
    }  # fmt: skip
    assert found.pop("checksums of the file") == 0.0  # So small a model has none.
    assert all(value > 0.0 for name, value in found.items() if "CPU" not in name)
    beside = (
        "tokenizer, beside the weights", "weights, system CPU", "weights, own CPU", "total",
        "total beyond import torch",
    )  # fmt: skip
    assert sum(value for name, value in found.items() if name not in beside) <= found["total"]
