"""Builds the documentation site from the Markdown of the tree: ``python -m tools.site``.

The pages keep their places, so that their links lead where they lead in the tree; the API reference
is made from the docstrings. A link or an anchor that leads nowhere is an error. Needs the extra
``docs``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import asyncllm
from tests.public_api import MODULES

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
MARKDOWN = ["*.md", "docs/*.md", "benchmarks/README.md", "asyncllm/demo_model/README.md"]
LINK = re.compile(r"\[([^]]*)\]\((?!\w+:|#)([^)#\s]+)\)")


def gather(pages: Path = PAGES) -> None:
    """Copies the pages and the files that they show or link to, and writes the API reference."""
    shutil.rmtree(pages, ignore_errors=True)
    for source in sorted(path for pattern in MARKDOWN for path in ROOT.glob(pattern)):
        copy = pages / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        for words, link in LINK.findall(text):
            linked = (source.parent / link).resolve()
            if linked.is_dir():
                # A site has no listing of a folder.
                text = text.replace(f"[{words}]({link})", words)
            elif linked.is_file() and linked.suffix != ".md":
                place = pages / linked.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(linked, place)
        copy.write_text(text, encoding="utf-8")
    (pages / "api.md").write_text(api_page(), encoding="utf-8")


def api_page() -> str:
    """Page of the API reference, for mkdocstrings: every public name by its module."""
    entries = [
        f"::: {module}.{name}\n    options:\n      heading: asyncllm.{name}\n"
        for name, module in sorted(asyncllm._MODULE_BY_NAME.items())
    ]
    entries += [f"::: {module}.{name}\n" for module, names in MODULES.items() for name in names]
    return "\n".join(["# API reference\n", *entries])


def main() -> None:
    gather()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    subprocess.run(command, cwd=ROOT, check=True)
    print(SITE / "index.html")


if __name__ == "__main__":
    main()
