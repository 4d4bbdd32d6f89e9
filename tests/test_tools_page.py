"""Every snippet of docs/tools.md, on the packaged model."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "tools.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```\n+```text\n(.*?)^```", PAGE, re.M | re.S)


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SNIPPETS) == PAGE.count("```python") == 7

    async def run() -> None:
        names: dict[str, object] = {"__name__": "__main__"}
        for source, printed in SNIPPETS:
            code = compile(source, "docs/tools.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            running = eval(code, names)
            if inspect.iscoroutine(running):
                await running
            assert capsys.readouterr().out.rstrip() == printed.rstrip()

    asyncio.run(run())
