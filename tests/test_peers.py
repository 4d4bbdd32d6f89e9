"""The benchmark against other engines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import peers


@pytest.mark.slow
def test_one_command_measures_and_names_the_missing(tmp_path):
    report = tmp_path / "report.json"
    base_executable = vars(sys)["_base_executable"]  # outside the virtual environment
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.peers", "--shape", "tiny", "--rounds", "1"),
            *("--folder", str(tmp_path), "--json", str(report), "--dtype", "float32"),
            *("--python", f"openvino-genai={base_executable}"),
        ],
        capture_output=True,
        text=True,
        cwd=peers.ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "openvino-genai: not installed" in done.stdout
    figures = json.loads(report.read_text())["figures"]
    assert [figure["name"] for figure in figures] == ["asyncllm", "transformers"] * len(peers.UNITS)
    assert all(figure["value"] > 0 for figure in figures)
