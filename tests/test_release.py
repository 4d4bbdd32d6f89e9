"""Consistency of version numbers."""

from __future__ import annotations

import os
import re
import tomllib
from datetime import date
from pathlib import Path

import asyncllm
from tools.wheels import TARGETS

ROOT = Path(__file__).parent.parent
TAG = "RELEASE_TAG"
"""The environment variable with the tag that is published: "v" and the version."""


def changes(text: str) -> tuple[str, str]:
    """The version and the date, or "unreleased", of the first heading."""
    found = re.search(r"^## (\S+) \((.+)\)$", text, re.M)
    assert found is not None
    return found[1], found[2]


def is_released(when: str) -> bool:
    """Whether it is a day; anything but a day or "unreleased" is an error."""
    return when != "unreleased" and date.fromisoformat(when) is not None


def test_the_version_is_that_of_the_changes() -> None:
    version, when = changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert version == project["version"] == asyncllm.__version__
    released = is_released(when)
    if (tag := os.environ.get(TAG)) is not None:
        assert tag == f"v{version}"
        assert released


def test_a_heading_has_a_version_and_a_day() -> None:
    assert changes("# Changes\n\n## 1.2.0 (2027-01-31)\n\n## 1.1.0 (2026-12-24)\n") == (
        "1.2.0",
        "2027-01-31",
    )
    assert is_released("2027-01-31")
    assert not is_released("unreleased")


def test_pages_name_the_wheels_that_are_made() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [named] = set(re.findall(r"asyncllm-(\S+?)-py3-none-(\w+)\.whl", readme))
    assert named == (asyncllm.__version__, next(iter(TARGETS)))
    page = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
    assert set(TARGETS) == set(re.findall(r"^\| `(\w+_\w+)` ", page, re.M))
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
    assert set(TARGETS) == set(re.findall(r"wheel: (\w+)", workflow))
