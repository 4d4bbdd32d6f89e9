"""The API reference: docstrings of public names, and the documentation site."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

import asyncllm
from tests.processes import python
from tests.public_api import MADE_FOR_THE_CALLER, MODULES, _members
from tools.site import SITE

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


@pytest.fixture(scope="module")
def site() -> Path:
    """The documentation site, by the command of CONTRIBUTING.md."""
    pytest.importorskip("zensical")
    done = python("-m", "tools.site", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


@pytest.mark.slow
def test_the_reference_is_generated(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in CLASSES:
        assert f'id="{asyncllm._MODULE_BY_NAME[name]}.{name}"' in page, name
    assert 'id="asyncllm.engine.AsyncLLMEngine.chat"' in page
    assert 'title="asyncllm.sampling_params.SamplingParams.temperature"' in page
    assert "which a chat template renders" in page


@pytest.mark.slow
def test_the_site_has_every_page_and_can_be_searched(site: Path) -> None:
    found = {path.stem for path in (site / "docs").glob("*.html")}
    assert found == {path.stem for path in (ROOT / "docs").glob("*.md")}
    home = (site / "index.html").read_text(encoding="utf-8")
    listed = set(re.findall(r'href="\./docs/(\w+)\.html"', home))
    assert found <= listed, "mkdocs.yml has to name every page"
    assert 'content="width=device-width' in home
    assert not re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css)', home)
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    assert any("FakeExecutor" in json.dumps(item) for item in index["items"])


@pytest.mark.slow
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    (tmp_path / "pages").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: site\ndocs_dir: pages\n")
    for text, told in (("[x](none.md)", "page does not exist"), ("[x](#none)", "anchor does not")):
        (tmp_path / "pages" / "index.md").write_text(f"# Start\n\n{text}\n")
        done = python("-m", "zensical", "build", "--strict", cwd=tmp_path)
        assert done.returncode != 0
        assert told in re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
