"""What goes into the source distribution."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_source_distribution_takes_whole_folders_of_the_root() -> None:
    """A pattern without a leading slash matches in any folder, as in a .gitignore."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"/asyncllm", "/tests", "/docs", "/constraints.txt"} <= set(patterns)
    for pattern in patterns:
        assert pattern.startswith("/"), pattern
        assert list(ROOT.glob(pattern[1:])), pattern
