"""Import order of the rooms."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import asyncllm

PACKAGE = Path(asyncllm.__file__).parent

ROOMS = (
    "__main__",
    "cli",
    "serving",
    "tracing",
    "testing",
    "__init__",
    "callbacks",
    "metrics",
    "beams",
    "llm",
    "group",
    "group_queue",
    "group_agreement",
    "engine",
    "rows",
    "stream runtime",  # The input processor makes the streams, which run on event loops.
    "output_reader",
    "tool_calls",
    "gpu",
    "native",
    "config",
    "observer",
    "text",
    "routing",
    "core",
    "checkpoint",
    "logits_processor",
    "sampling_params",
    "outputs",
    "structured",
    "validation",
    "json_copier",
    "foreign_names",
    "errors logger owner_lines thread_priority version",
)
"""Top to bottom: a room imports rooms below it, and those of its own line."""


def statements(source: str, with_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports at the top of a file and within its functions.

    Args:
        with_types: those under ``TYPE_CHECKING`` as well.
    """
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        if isinstance(node, ast.expr):
            continue
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        left_out = typing_only and not with_types
        nodes += node.orelse if left_out else ast.iter_child_nodes(node)


def names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What an import names, in full: modules, or what is in them."""
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [prefix + alias.name for alias in node.names]


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Modules that each module imports, for types too."""

    def module_of(name: str) -> str:
        while name not in sources:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {
            module_of(name)
            for node in statements(source, with_types=True)
            for name in names(node)
            if name.split(".")[0] == "asyncllm"
        }
        for module, source in sources.items()
    }


@cache
def package_graph() -> dict[str, set[str]]:
    sources = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("asyncllm", *path.relative_to(PACKAGE).with_suffix("").parts))
        sources[module.removesuffix(".__init__")] = path.read_text()
    return import_graph(sources)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def arrows_up(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Imports of a room above."""
    rank = {name: place for place, line in enumerate(ROOMS) for name in line.split()}
    return [
        f"{module} -> {imported}"
        for module, found in graph.items()
        for imported in found
        if rank[room(imported)] < rank[room(module)]
    ]


def check_circles(graph: Mapping[str, set[str]]) -> None:
    """Raises CycleError, which names the modules of a circle."""
    graphlib.TopologicalSorter(graph).prepare()


BANNED = {
    "core": "torch asyncio logging asyncllm.gpu asyncllm.runtime asyncllm.checkpoint",
    "checkpoint": "torch asyncllm.core asyncllm.gpu asyncllm.runtime",
    "tool_calls": "torch asyncio asyncllm.core asyncllm.gpu asyncllm.runtime",
    "text": "torch asyncio asyncllm.core asyncllm.gpu asyncllm.runtime",
    "gpu": "asyncio logging asyncllm.runtime asyncllm.engine asyncllm.stream",
}
"""What a room does not import; the engine thread's loggers are those of asyncllm.logger."""


@pytest.mark.parametrize(("room", "banned"), BANNED.items())
def test_a_room_imports_nothing_from_above_it(room: str, banned: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert len(files) > 4
    for path in files:
        for node in statements(path.read_text(), with_types=False):
            for name in names(node):
                assert not any(name == b or name.startswith(f"{b}.") for b in banned.split()), (
                    path,
                    name,
                )


def test_imports_point_down() -> None:
    graph = package_graph()
    assert "asyncllm.validation" in graph["asyncllm.config"]
    assert arrows_up(graph) == []


def test_imports_have_no_circles() -> None:
    check_circles(package_graph())


def test_no_test_module_imports_another() -> None:
    sources = {path: path.read_text() for path in Path(__file__).parent.rglob("*.py")}
    for path, source in sources.items():
        if not re.search(r"import.*\btest_", source):
            continue
        for node in statements(source, with_types=True):
            assert not any(".test_" in name for name in names(node)), path


@pytest.mark.parametrize(
    "imported",
    [
        "from asyncllm.engine import AsyncLLMEngine",
        "from asyncllm import engine",
        "import asyncllm.engine",
        "def f():\n    import asyncllm.engine as e",
        "if TYPE_CHECKING:\n    from asyncllm.engine import AsyncLLMEngine",
    ],
)
def test_upward_and_circular_imports_are_detected(imported: str) -> None:
    sources = {
        "asyncllm": "",
        "asyncllm.engine": "from asyncllm.core.request import Request",
        "asyncllm.core": "",
        "asyncllm.core.request": imported,
    }
    graph = import_graph(sources)
    assert arrows_up(graph) == ["asyncllm.core.request -> asyncllm.engine"]
    with pytest.raises(graphlib.CycleError):
        check_circles(graph)
