"""The library of native ops for tests, compiled where it has not been."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncllm.gpu.ops.cpu_ops import CpuOps
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.native.build import ISA_FLAGS, SOURCE_DIRECTORY, BuildError, build, find_compiler
from asyncllm.native.context import NativeContext
from asyncllm.native.shared_library import Library, NativeUnavailableError
from tests.slow import slow_but

OTHER_LIBRARY = "NATIVE_LIBRARY"
"""The environment variable that names another library to test."""
INT8_IN_SPANS = ("avx512", "avx512bf16")
"""Instruction sets that round inputs of int8 weights to 8 bits in spans; others do to 16 bits."""
FUZZ = sorted((Path(__file__).parent / "native").glob("*.cpp"))
EMULATION = Path(__file__).parent / "native" / "avx512_emulation.h"


def build_emulated(output: Path, flags: Sequence[str] = ()) -> None:
    """Builds both sets of AVX-512 in halves of AVX2, for a processor that lacks them."""
    units = dict(ISA_FLAGS["x86_64"])
    for name in INT8_IN_SPANS:
        ISA_FLAGS["x86_64"][name] = [*units["avx2"], "-include", str(EMULATION)]
    try:
        # The library asks the processor.
        build(output, extra_flags=["-DASYNCLLM_EMULATED", *flags])
    finally:
        ISA_FLAGS["x86_64"] = units


@functools.cache
def native_library() -> Library | None:
    """None where there is no compiler; one that fails is an error."""
    if (other := os.environ.get(OTHER_LIBRARY)) is not None:
        return Library(Path(other))
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
    for name in ("avx512bf16", "avx512", "avx2", "neon", "baseline"):
        try:
            if library is not None and NativeContext(library, 1, name):
                found.append(name)
        except NativeUnavailableError:
            pass
    return found


@functools.cache
def cpu_ops(name: str) -> CpuOps:
    """The CPU's op set of that name, of CPU_OPS."""
    return CpuOps() if name == "cpu" else NativeOps(context(2, name.removeprefix("native-")))


def context(num_threads: int = 1, isa: str | None = None) -> NativeContext:
    library = native_library()
    if library is None:
        pytest.skip("no C++ compiler to build the native ops with")
    return NativeContext(library, num_threads, isa)


ISAS = isas()
needs_native = pytest.mark.skipif(not ISAS, reason="no C++ compiler to build the native ops with")
OFTEN = {*ISAS[:1], *ISAS[-1:]}
"""The best instruction set, which models use, and the one of every machine."""
each_isa = pytest.mark.parametrize("isa", slow_but(ISAS, *OFTEN))


def op_sets(*others: str) -> list[Any]:
    """Parameters: the ``others`` and native ops by instruction set."""
    native = [f"native-{isa}" for isa in ISAS]
    return slow_but([*others, *native], *others, *(f"native-{isa}" for isa in OFTEN))


CPU_OPS = op_sets("cpu")
"""The op sets whose sampling runs on a CPU, native ones on two threads."""


def check_forked_child(run: Callable[[], object], end: Callable[[], object] = lambda: None) -> None:
    """A child in which ``run`` is refused; ``end`` ends the child's copies."""
    child = os.fork()
    if not child:
        signal.alarm(30)  # It would wait for threads that it has not.
        told = 1
        try:
            run()
        except RuntimeError as error:
            told = 0 if "forked child" in str(error) else 2
        end()
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def compiler() -> list[str]:
    """Command of the compiler; skips the test where there is none."""
    try:
        return find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


def link(program: Path, library: Path, command: list[str], flags: list[str]) -> None:
    """Build the fuzz against a library."""
    linking = [
        *map(str, FUZZ),
        str(library),
        f"-Wl,-rpath,{library.parent}",
        "-I",
        str(SOURCE_DIRECTORY),
    ]
    subprocess.run([*command, "-std=c++17", *flags, *linking, "-o", str(program)], check=True)


def run_fuzz(program: Path, seed: int, rounds: int, isa: str, *emulator: str) -> str:
    """Run the fuzz; returns the digest of its results."""
    command = [*emulator, str(program), str(seed), str(rounds), isa]
    done = subprocess.run(command, capture_output=True, text=True)
    said, _, digest = done.stdout.strip().partition(", digest ")
    expected = f"{isa}: {rounds} rounds from seed {seed}"
    assert (done.returncode, said) == (0, expected), done.stderr[-4000:]
    return digest
