"""Which parts of the package import which."""

from __future__ import annotations

import ast
import graphlib
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
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
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
        ("tools", ("torch", "asyncio", "asyncllm.core", "asyncllm.gpu", "asyncllm.runtime")),
        ("text", ("torch", "asyncio", "asyncllm.core", "asyncllm.gpu", "asyncllm.runtime")),
        ("gpu", ("asyncio", "logging", "asyncllm.runtime", "asyncllm.engine", "asyncllm.stream")),
    ],
)
def test_a_room_imports_nothing_from_above_it(room: str, banned: tuple[str, ...]) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert len(files) > 4
    for path in files:
        for name in imports(path):
            assert not any(name == b or name.startswith(f"{b}.") for b in banned), (path, name)


def test_no_module_imports_one_that_imports_it() -> None:
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("asyncllm", *path.relative_to(PACKAGE).with_suffix("").parts))
        graph[module.removesuffix(".__init__")] = set(imports(path))
    assert "asyncllm.validation" in graph["asyncllm.config"]
    # The package itself resolves its names lazily.
    graph.pop("asyncllm")
    graphlib.TopologicalSorter(graph).prepare()
