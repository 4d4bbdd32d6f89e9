"""Memory after rounds of opening an engine, traffic of all sizes, and closing it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_rounds_of_mixed_traffic_leave_nothing_behind(tmp_path):
    """In a process of its own, where other tests leave nothing."""
    file = tmp_path / "memory.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--quick", f"--json={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
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
