"""Compiles the native ops into a wheel. Without a compiler it is the same wheel without them.

``tools.wheels`` compiles for other platforms itself, and names the library and the tag by
environment variables.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "asyncllm" / "native"
PLATFORM = "ASYNCLLM_WHEEL_PLATFORM"
"""Environment variable: platform tag of the wheel; "any" is a wheel without native ops."""
COMPILED = "ASYNCLLM_WHEEL_LIBRARY"
"""Environment variable: file of the native ops that were compiled for that platform."""


class NativeOpsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        platform = os.environ.get(PLATFORM)
        if platform == "any":
            return
        if platform is not None:
            library = Path(os.environ[COMPILED])
            build_data["force_include"][str(library)] = f"asyncllm/native/{library.name}"
            self._tag(build_data, platform)
            return
        build = _load(NATIVE / "build.py")
        try:
            found = build.build()
        except build.BuildError as error:
            self.app.display_warning(f"asyncllm is built without native ops: {error}")
            return
        self.app.display_info(f"native ops: {', '.join(found)}")
        build_data["artifacts"].append(f"asyncllm/native/{build.LIBRARY_PATH.name}")
        self._tag(build_data, sysconfig.get_platform().replace("-", "_").replace(".", "_"))

    def _tag(self, build_data: dict[str, Any], platform: str) -> None:
        # The library links against no Python, so one wheel serves all versions.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def _load(path: Path) -> ModuleType:
    """The module alone: its package's own imports may be missing while it is built."""
    spec = importlib.util.spec_from_file_location("asyncllm_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
