"""Which parts of the package import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncllm

PACKAGE = Path(asyncllm.__file__).parent


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports when it runs, at its top or within a function."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        nodes += node.orelse if typing_only else ast.iter_child_nodes(node)


@pytest.mark.parametrize(
    ("room", "banned"),
    [
        # The engine thread's loggers are those of asyncllm.logger.
        (
            "core",
            (
                "torch",
                "asyncio",
                "logging",
                "asyncllm.gpu",
                "asyncllm.runtime",
                "asyncllm.checkpoint",
            ),
        ),
        ("checkpoint", ("torch", "asyncllm.core", "asyncllm.gpu", "asyncllm.runtime")),
        ("gpu", ("asyncio", "logging", "asyncllm.runtime", "asyncllm.engine", "asyncllm.stream")),
    ],
)
def test_a_room_imports_nothing_from_above_it(room: str, banned: tuple[str, ...]) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert len(files) > 4
    for path in files:
        for name in imports(path):
            assert not any(name == b or name.startswith(f"{b}.") for b in banned), (path, name)
