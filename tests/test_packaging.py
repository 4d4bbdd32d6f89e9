"""What goes into the source distribution and the wheel."""

from __future__ import annotations

import runpy
import sys
import sysconfig
import tomllib
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncllm.native.build import LIBRARY, UNITS, BuildError

ROOT = Path(__file__).parent.parent


def test_the_source_distribution_takes_whole_folders_of_the_root() -> None:
    """A pattern without a leading slash matches in any folder, as in a .gitignore."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"/asyncllm", "/tests", "/docs", "/constraints.txt"} <= set(patterns)
    for pattern in patterns:
        assert pattern.startswith("/"), pattern
        assert list(ROOT.glob(pattern[1:])), pattern


def test_a_wheel_holds_the_native_ops_where_they_could_be_compiled(monkeypatch) -> None:
    """Without a compiler it is a wheel for any platform."""
    plugin = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    plugin.BuildHookInterface = object  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("", ".builders", ".builders.hooks", ".builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, f"hatchling{name}", types.ModuleType("hatchling"))
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    said: list[str] = []
    hooks = runpy.run_path(str(ROOT / "hatch_build.py"))
    module = SimpleNamespace(BuildError=BuildError, LIBRARY=LIBRARY, build=lambda: ["baseline"])
    hook = hooks["NativeOpsHook"]
    monkeypatch.setitem(hook.initialize.__globals__, "_load", lambda path: module)

    def run() -> dict[str, Any]:
        made = hook()
        made.app = SimpleNamespace(display_warning=said.append, display_info=lambda text: None)
        data: dict[str, Any] = {"artifacts": [], "pure_python": True}
        made.initialize("standard", data)
        return data

    data = run()
    assert data["artifacts"] == [str(LIBRARY.relative_to(ROOT))]
    assert not data["pure_python"]
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert data["tag"] == f"py3-none-{platform}"

    def fails() -> list[str]:
        raise BuildError("no C++ compiler")

    module.build = fails
    assert run() == {"artifacts": [], "pure_python": True}
    assert said == ["asyncllm is built without native ops: no C++ compiler"]
    assert hooks["_load"](LIBRARY.parent / "build.py").UNITS == UNITS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "custom" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
