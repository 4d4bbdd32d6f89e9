"""Direct launches reach the driver as those do that the JIT makes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the stub of libcuda is compiled")
def test_launches_under_the_real_launch_path() -> None:
    """In a process of its own, which keeps the stub of libcuda. Kernels are compiled for an H200,
    which takes seconds each where Triton's cache has none."""
    command = [sys.executable, "-m", "tests.triton.stub_launches"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout == "same\n"
