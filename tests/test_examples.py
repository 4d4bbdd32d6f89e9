"""Every example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.example_process import run_example
from tests.slow import slow_but

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
EXPECTED = {
    "minimal_stream.py": r"(?s)\w.{40,}\n",
    "many_streams.py": r"(?s).+\n100 streams, \d+ tokens, \d+ tokens a second\n",
    "function_calling.py": r'What is .*\?\n  get_weather\({"city": "Oslo"}\) -> snow\n'
    r'It is snow in Oslo\.\nWhat is .*\?\n  add\({"a": 12, "b": 30}\) -> 42\n'
    r"The answer is 42\.\n",
    "cancel_in_agent_loop.py": r"(?s).*\d+ requests aborted\n(\d+) of \1 KV blocks free\n",
}


def test_every_example_is_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*EXPECTED, "ray_scale.py"}  # The integration with Ray runs the latter.


@pytest.mark.parametrize("name", slow_but(EXPECTED, "minimal_stream.py"))
def test_example(name: str) -> None:
    told = run_example(EXAMPLES / name, "-W", "error")
    assert re.fullmatch(EXPECTED[name], told), told
