"""Every example runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EXPECTED = {
    "minimal_stream.py": r"(?s)\w.{40,}\n",
    "many_streams.py": r"(?s).+\n100 streams, \d+ tokens, \d+ tokens a second\n",
    "cancel_in_agent_loop.py": r"(?s).*\d+ requests aborted\n(\d+) of \1 KV blocks free\n",
}


def test_every_example_is_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        # More threads than idle cores make a small model slow.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(EXPECTED[name], done.stdout), done.stdout
