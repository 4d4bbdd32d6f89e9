"""The Python blocks of docs/ray.md and README.md run, and so does the README's command."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("page", "expected"), [("docs/ray.md", 4), ("integrations/ray/README.md", 1)]
)
async def test_a_page_runs(
    cluster: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, page: str, expected: int
) -> None:
    # The tests' Ray runs already.
    monkeypatch.setattr(ray, "init", lambda **_: None)
    names: dict[str, Any] = {}
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(blocks) == expected
    printed = []
    for block in blocks:
        code = compile(block, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.iscoroutine(running := eval(code, names)):
            await running
        printed.append(capsys.readouterr().out)
    names["client"].close()
    await asyncio.to_thread(serve.delete, "llm")
    assert len(printed[0]) > 40
    if expected > 1:
        answers = ast.literal_eval(printed[2].splitlines()[-1])
        assert len(answers) == 8


def test_the_readmes_command_runs() -> None:
    command = [sys.executable, "-m", "asyncllm_ray", "Tell me a story about Mia and a boat."]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Mia" in found.stdout


def test_the_example_scales_under_load() -> None:
    command = [sys.executable, str(ROOT / "examples" / "ray_scale.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    lines = found.stdout.splitlines()
    assert "cancelled: nothing runs" in lines
    assert [line[0] for line in lines if "replicas after" in line] == ["2", "1"]
    assert [line for line in lines if line.endswith("answers, 0 replicas lost")]
