"""Benchmarks that take seconds, run as a person runs them: figures, memory after rounds of traffic,
and the parts of a cold start."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import cold_start, peer_checkpoint
from tests.processes import python

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["groups", "parsing", "routing", "scheduler"])
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
