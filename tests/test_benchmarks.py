"""Benchmarks that take seconds, run as a person runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slow_but

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", slow_but(["parsing", "scheduler"], "parsing"))
def test_a_quick_run_writes_what_it_measured(name: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", f"--json={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    assert len(figures) > 3
    assert figures[0]["name"] in done.stdout
    for figure in figures:
        assert figure["value"] > 0, figure
