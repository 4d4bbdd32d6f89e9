"""Contents of the source distribution and the wheel."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import types
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm.native.build import ISA_FLAGS, LIBRARY_PATH, BuildError

ROOT = Path(__file__).parent.parent


def test_source_distribution_takes_whole_root_folders() -> None:
    """A pattern without a leading slash matches in any folder, as in a .gitignore."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"/asyncllm", "/tests", "/docs", "/constraints.txt"} <= set(patterns)
    for pattern in patterns:
        assert pattern.startswith("/"), pattern
        assert list(ROOT.glob(pattern[1:])), pattern


@pytest.fixture
def hooks(monkeypatch) -> dict[str, Any]:
    """The names of ``hatch_build.py``, loaded without hatchling."""
    plugin = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    plugin.BuildHookInterface = object  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("", ".builders", ".builders.hooks", ".builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, f"hatchling{name}", types.ModuleType("hatchling"))
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    return runpy.run_path(str(ROOT / "hatch_build.py"))


def test_wheel_holds_native_ops_where_compiled(hooks, monkeypatch) -> None:
    """Without a compiler it is a wheel for any platform."""
    said: list[str] = []
    module = SimpleNamespace(
        BuildError=BuildError, LIBRARY_PATH=LIBRARY_PATH, build=lambda: ["baseline"]
    )
    hook = hooks["NativeOpsHook"]
    monkeypatch.setitem(hook.initialize.__globals__, "_load", lambda path: module)

    def run() -> dict[str, Any]:
        made = hook()
        made.app = SimpleNamespace(display_warning=said.append, display_info=lambda text: None)
        data: dict[str, Any] = {"artifacts": [], "pure_python": True}
        made.initialize("standard", data)
        return data

    data = run()
    assert data["artifacts"] == [str(LIBRARY_PATH.relative_to(ROOT))]
    assert not data["pure_python"]
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert data["tag"] == f"py3-none-{platform}"

    def fails() -> list[str]:
        raise BuildError("no C++ compiler")

    module.build = fails
    assert run() == {"artifacts": [], "pure_python": True}
    assert said == ["asyncllm is built without native ops: no C++ compiler"]
    assert hooks["_load"](LIBRARY_PATH.parent / "build.py").ISA_FLAGS == ISA_FLAGS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "custom" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]


def test_cross_platform_wheel_holds_its_library(hooks, monkeypatch) -> None:
    hook = hooks["NativeOpsHook"]()
    data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    monkeypatch.setenv("ASYNCLLM_WHEEL_PLATFORM", "any")
    hook.initialize("standard", data)
    assert data == {"force_include": {}, "pure_python": True}
    monkeypatch.setenv("ASYNCLLM_WHEEL_PLATFORM", "win_amd64")
    monkeypatch.setenv("ASYNCLLM_WHEEL_LIBRARY", "/made/asyncllm_ops.dll")
    hook.initialize("standard", data)
    assert data == {
        "force_include": {"/made/asyncllm_ops.dll": "asyncllm/native/asyncllm_ops.dll"},
        "pure_python": False,
        "tag": "py3-none-win_amd64",
    }


def _run(*command: Any, cwd: Path = ROOT) -> str:
    # A path that this process was given would stand before what is installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in command]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_distributions_install_and_run(tmp_path: Path) -> None:
    """Built as they would be published; the dependencies are those of this environment."""
    pytest.importorskip("build")
    pytest.importorskip("twine")
    dist = tmp_path / "dist"
    folders = [ROOT, *(path.parent for path in (ROOT / "integrations").glob("*/pyproject.toml"))]
    for folder in folders:
        _run(sys.executable, "-m", "build", "--outdir", dist, folder)
    built = sorted(dist.iterdir())
    assert len(built) == 2 * len(folders) == 8
    _run(sys.executable, "-m", "twine", "check", "--strict", *built)

    [wheel] = dist.glob("asyncllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in ("py.typed", "demo_model/model.safetensors", "demo_model/chat_template.jinja"):
        assert f"asyncllm/{name}" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"asyncllm"}
    [source] = dist.glob("asyncllm-*.tar.gz")
    with tarfile.open(source) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("SECURITY.md", "docs/images/demo.svg", "tests/test_engine.py", "hatch_build.py"):
        assert name in files
    assert not [name for name in files if name.startswith(("integrations/", "build/"))]
    assert not [name for name in files if name.endswith((".so", ".pyc"))]

    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    wheels = [path for path in built if path.suffix == ".whl"]
    _run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", *wheels)
    [site] = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    program = (
        "import asyncllm, langchain_asyncllm, sys\n"
        "assert asyncllm.__file__.startswith(sys.prefix), asyncllm.__file__\n"
        "with asyncllm.LLM() as llm: print(llm.generate('Who are you?', temperature=0))\n"
    )
    said = _run(python, "-c", program, cwd=tmp_path)
    assert "small model" in said
    assert "asyncllm 0" in _run(environment / "bin" / "asyncllm", "--version", cwd=tmp_path)
