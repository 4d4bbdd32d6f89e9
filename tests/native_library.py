"""The library of native ops for tests, compiled where it has not been."""

from __future__ import annotations

import functools

import pytest

from asyncllm.gpu.ops.cpu_ops import CpuOps
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.native import Context, Library, NativeUnavailableError
from asyncllm.native.build import BuildError, build, find_compiler


@functools.cache
def native_library() -> Library | None:
    """None where there is no compiler; one that fails is an error."""
    try:
        return Library()
    except NativeUnavailableError:
        pass
    try:
        find_compiler()
    except BuildError:
        return None
    build()
    return Library()


def isas() -> list[str]:
    """The instruction sets that this machine can run."""
    library = native_library()
    found = []
    for name in ("avx512", "avx2", "neon", "baseline"):
        try:
            if library is not None and Context(library, 1, name):
                found.append(name)
        except NativeUnavailableError:
            pass
    return found


@functools.cache
def cpu_ops(name: str) -> CpuOps:
    """The CPU's op set of that name, of CPU_OPS."""
    return CpuOps() if name == "cpu" else NativeOps(context(2, name.removeprefix("native-")))


def context(num_threads: int = 1, isa: str | None = None) -> Context:
    library = native_library()
    if library is None:
        pytest.skip("no C++ compiler to build the native ops with")
    return Context(library, num_threads, isa)


CPU_OPS = ["cpu", *(f"native-{isa}" for isa in isas())]
"""The op sets whose sampling runs on a CPU, native ones on two threads."""
