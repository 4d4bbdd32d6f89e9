"""The benchmark of cold starts: its parts are parts of the whole."""

from __future__ import annotations

import pytest

from benchmarks import cold_start, peer_checkpoint
from benchmarks.cold_process import Parts
from benchmarks.common import Report


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
    }  # fmt: skip
    assert all(value > 0.0 for name, value in found.items() if "CPU" not in name)
    beside = ("tokenizer, beside the weights", "weights, system CPU", "weights, own CPU", "total")
    assert sum(value for name, value in found.items() if name not in beside) <= found["total"]
