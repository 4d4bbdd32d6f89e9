"""The API reference: every public name has a docstring, and a place on the generated page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import asyncllm
from tests.processes import python
from tests.public_api import MADE_FOR_THE_CALLER, MODULES, _members

ROOT = Path(__file__).parent.parent
CLASSES = [name for name in asyncllm.__all__ if inspect.isclass(getattr(asyncllm, name))]


def test_every_public_name_has_a_docstring() -> None:
    for name in asyncllm.__all__:
        value = getattr(asyncllm, name)
        if not inspect.isclass(value):
            continue
        # A dataclass without one has its signature for it.
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}(")
        for member, found in _members(value):
            function = getattr(found, "__func__", found)
            assert not inspect.isfunction(function) or inspect.getdoc(function), (name, member)
    assert len(CLASSES) > 25
    assert {*CLASSES, *(n for names in MODULES.values() for n in names)} >= MADE_FOR_THE_CALLER


def test_the_reference_is_generated(tmp_path: Path) -> None:
    """By the command of CONTRIBUTING.md."""
    pytest.importorskip("pdoc")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    command = re.search(r"^python -m (pdoc .+) -o build/api (.+)$", text, re.M)
    assert command is not None
    arguments = [*command[1].split(), "-o", str(tmp_path), *command[2].replace("'", "").split()]
    done = python("-m", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "asyncllm.html").read_text(encoding="utf-8")
    for name in CLASSES:
        assert f'id="{name}"' in page
    for anchor in ("AsyncLLMEngine.chat", "SamplingParams.temperature", "TokenStream.result"):
        assert f'id="{anchor}"' in page
    assert "which a chat template renders" in page
    assert not list(tmp_path.glob("asyncllm/gpu*"))
