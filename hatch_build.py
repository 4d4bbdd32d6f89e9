"""Compiles the native ops into a wheel. Without a compiler it is the same wheel without them."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "asyncllm" / "native"


class NativeOpsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = _load(NATIVE / "build.py")
        try:
            found = build.build()
        except build.BuildError as error:
            self.app.display_warning(f"asyncllm is built without native ops: {error}")
            return
        self.app.display_info(f"native ops: {', '.join(found)}")
        # It links against no Python, so one wheel serves all versions.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"asyncllm/native/{build.LIBRARY.name}")


def _load(path: Path) -> ModuleType:
    """The module alone: its package's own imports may be missing while it is built."""
    spec = importlib.util.spec_from_file_location("asyncllm_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
