"""The files and the command line of the GPU benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.common import Report
from benchmarks.gpu.stage import Deadline, Stage
from tests.gpu_stand_ins import figures, make_stage

ROOT = Path(__file__).parent.parent


def test_figures_are_written_after_every_measurement(tmp_path, monkeypatch):
    out, file = tmp_path / "found", tmp_path / "found" / "decode.json"
    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/gpu/__main__.py", "--out", str(out)])
    conditions = {"gpu": "a GPU", "driver": "1"}
    stage = Stage(Report("test", conditions), Deadline(9), name="decode", out=out)
    stage.attempt("one", 1, lambda: stage.report.add("figure", 1.5, "s"))
    stage.write("tables", {"best": [1, 2]})
    assert json.loads((out / "decode-tables.json").read_text()) == {"best": [1, 2]}
    written = json.loads(file.read_text())
    assert written["figures"] == [{"name": "figure", "value": 1.5, "unit": "s", "note": ""}]
    assert written["machine"]["gpu"] == "a GPU"
    assert written["machine"]["driver"] == "1"
    assert written["command"] == "python -m benchmarks.gpu --out found"
    assert str(tmp_path) not in file.read_text()


def test_the_command_refuses_without_a_gpu():
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--stage", "kernels"],
        cwd=ROOT,
        env=hidden,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "needs an NVIDIA GPU" in done.stderr


def test_a_wrong_kernel_is_counted_and_named(capsys):
    from benchmarks.gpu import kernels

    def wrong() -> None:
        raise AssertionError("row 3: 1 of 8 vectors are off")

    stage = make_stage()
    family = kernels.Family("norms", {"a": lambda: None, "b": wrong, "c": lambda: None})
    kernels.run_families(stage, [family])
    assert figures(stage)["norms, wrong"] == 1.0
    assert stage.report.figures[-1].note == "goal at most 0.00: NO; 2 of 3 cases right"
    assert "FAILED  norms: b: AssertionError: row 3" in capsys.readouterr().out
    assert stage.finish() == 1


def test_checks_of_the_stage_run_on_the_plain_functions():
    """So that what the stage imports from the tests is what the backends are held to."""
    from asyncllm.gpu.ops.torch_ops import TorchOps
    from tests.triton import checks

    checks.check_step_state(TorchOps().decode_inputs, "cpu", 16)
