"""Compiles the library of native ops: ``python -m asyncllm.native.build``.

This file may import nothing but the standard library: the distribution's build hook loads the file
by its path.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIRECTORY = Path(__file__).parent / "src"
LIBRARY_NAMES = {
    "linux": "libasyncllm_ops.so",
    "darwin": "libasyncllm_ops.dylib",
    "win32": "asyncllm_ops.dll",
}
"""File names of the library, by system as ``sys.platform`` names it."""
LIBRARY_PATH = Path(__file__).parent / LIBRARY_NAMES.get(sys.platform, LIBRARY_NAMES["linux"])

BASELINE_SOURCE_NAMES = (
    "library weights sequences memory routing experts recurrent sampler logits program pool queue "
    "kernels_baseline"
).split()
"""Source files, without suffix, whose code every processor of the architecture can run."""

COMPILER_FLAGS = (
    "-std=c++17 -O2 -ffp-contract=off -fno-math-errno -fno-strict-aliasing "
    "-fno-exceptions -fno-rtti -fvisibility=hidden -Wall -Wextra"
).split()
SYSTEM_FLAGS = {"linux": ["-fPIC", "-pthread"], "darwin": ["-fPIC", "-pthread"], "win32": []}
# Of the C++ standard library the sources use only headers, so linking it statically adds no code.
LINK_FLAGS = {
    "linux": "-shared -static-libstdc++ -static-libgcc -Wl,-z,defs -Wl,-s".split(),
    "darwin": "-shared -Wl,-x".split(),
    "win32": "-shared -Wl,-s -lapi-ms-win-core-synch-l1-2-0".split(),
}
# Turn off warnings about uninitialised values: GCC would warn about its own _mm512_undefined_ps.
_AVX512_FLAGS = (
    "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni "
    "-Wno-uninitialized -Wno-maybe-uninitialized"
).split()
ISA_FLAGS: dict[str, dict[str, Sequence[str]]] = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": _AVX512_FLAGS,
        "avx512bf16": [*_AVX512_FLAGS, "-mavx512bf16"],
    },
    "aarch64": {"neon": []},
}
"""Compiler flags by architecture, and by instruction set beyond the baseline."""
_ARCHITECTURE_BY_MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}
"""Architecture by ``platform.machine()``, where Windows or macOS has another name for it."""


def sources_digest() -> str:
    """Digest of the sources. A compiled library contains the digest of the sources from which it
    was built."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCE_DIRECTORY.glob("*.h"), *SOURCE_DIRECTORY.glob("*.cpp")]):
        digest.update(f"{source.name}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:32]


class BuildError(Exception):
    """The compiler is missing or failed; the message includes its output."""


def find_compiler() -> list[str]:
    """The command of ``$CXX``, or of the system's C++ compiler."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler: expected {named[0] if named else 'c++, g++ or clang++'}")


def build(
    output_path: Path = LIBRARY_PATH,
    *,
    compiler: Sequence[str] | None = None,
    linker: Sequence[str] | None = None,
    system: str = sys.platform,
    machine: str | None = None,
    only_isas: Sequence[str] | None = None,
    extra_flags: Sequence[str] = (),
) -> list[str]:
    """Compiles and links the library, and moves it into place atomically.

    Args:
        compiler: command of the compiler; None is the result of ``find_compiler``.
        linker: command that links the objects; None is the compiler's.
        system: target system, as ``sys.platform`` names it.
        machine: target architecture, as ``platform.machine()`` names it; None is this machine's.
        only_isas: instruction sets to compile beside the baseline; None compiles all.
        extra_flags: additional flags for compiling every unit and for linking.

    Returns:
        The compiled instruction sets. An instruction set is left out if the compiler does not know
        its flags.

    Raises:
        BuildError: the compiler is missing or fails, or the system is none of LIBRARY_NAMES.
    """
    if system not in LIBRARY_NAMES:
        raise BuildError(f"native ops are for {', '.join(LIBRARY_NAMES)}, and this is {system}")
    command = list(compiler or find_compiler())
    units = ISA_FLAGS.get(
        _ARCHITECTURE_BY_MACHINE.get(name := machine or platform.machine(), name), {}
    )
    chosen = units if only_isas is None else [name for name in units if name in only_isas]
    sets = [name for name in chosen if _compiler_accepts(command, units[name])]
    defines = [f'-DASYNCLLM_SOURCES="{sources_digest()}"']
    defines += [f"-DASYNCLLM_{name.upper()}" for name in sets]
    sources: dict[str, Sequence[str]] = dict.fromkeys(BASELINE_SOURCE_NAMES, ())
    sources["library"] = defines
    sources |= {f"kernels_{name}": units[name] for name in sets}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:

        def compile_unit(item: tuple[str, Sequence[str]]) -> str:
            name, unit_flags = item
            target = f"{folder}/{name}.o"
            source = str(SOURCE_DIRECTORY / f"{name}.cpp")
            every_flag = [*COMPILER_FLAGS, *SYSTEM_FLAGS[system], *unit_flags, *extra_flags]
            _run_compiler([*command, *every_flag, "-c", source, "-o", target])
            return target

        objects = list(threads.map(compile_unit, sorted(sources.items())))
        linked = output_path.with_name(f".{output_path.name}.{os.getpid()}")
        try:
            link = [*(linker or command), *objects, *SYSTEM_FLAGS[system], *LINK_FLAGS[system]]
            _run_compiler([*link, *extra_flags, "-o", str(linked)])
            os.replace(linked, output_path)
        finally:
            linked.unlink(missing_ok=True)
    return [*sets, "baseline"]


def _compiler_accepts(command: list[str], flags: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cpp")
        source.touch()
        probe = [*command, *flags, "-c", str(source), "-o", f"{folder}/empty.o"]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def _run_compiler(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}: {done.stderr.strip()[-2000:]}")


def main() -> None:
    try:
        sets = build()
    except BuildError as error:
        sys.exit(str(error))
    sys.stdout.write(f"{LIBRARY_PATH}: {', '.join(sets)}\n")


if __name__ == "__main__":
    main()
