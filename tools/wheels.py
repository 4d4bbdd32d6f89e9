"""Makes the wheels of all platforms and the source distribution, on Linux and without a container.

    python -m tools.wheels                           # everything, into dist/
    python -m tools.wheels manylinux_2_28_x86_64 any # these wheels

Needs the extra ``wheels``. Zig's compiler has the headers and link libraries of every platform,
glibc's of the old version too. Each native wheel is judged before it counts as made.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from asyncllm.native.build import LIBRARY_NAMES, build
from asyncllm.native.interface import SIGNATURES

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Target:
    """Zig's name of a platform; its system and architecture as ``sys.platform`` and
    ``platform.machine`` name them; the system's libraries that may be needed there."""

    triple: str
    system: str
    machine: str
    libraries: str


TARGETS = {
    "manylinux_2_28_x86_64": Target("x86_64-linux-gnu.2.28", "linux", "x86_64", ""),
    "manylinux_2_28_aarch64": Target("aarch64-linux-gnu.2.28", "linux", "aarch64", ""),
    "macosx_11_0_arm64": Target(
        "aarch64-macos.11.0", "darwin", "aarch64", r"/usr/lib/libSystem\.B\.dylib"
    ),
    "win_amd64": Target(
        "x86_64-windows-gnu", "win32", "x86_64",
        r"(?i:kernel32|ntdll|api-ms-win-(crt|core)-[a-z0-9-]+)\.dll",
    ),
}  # fmt: skip
"""Platforms with a native library, by their tag."""


class WheelError(Exception):
    """A wheel cannot be published; the message says why."""


def compile_library(target: Target, output: Path) -> None:
    """Compiles the native library for another platform."""
    zig = [sys.executable, "-m", "ziglang"]
    # Zig's runtime has mathematical functions of its own, which round differently from the system's.
    # Windows' compiler needs it for the stack.
    runtime = [] if target.system == "win32" else ["-rtlib=none"]
    build(
        output,
        compiler=[*zig, "c++", "-target", target.triple],
        linker=[*zig, "cc", "-target", target.triple, *runtime],
        system=target.system,
        machine=target.machine,
    )


def make(platform: str, dist: Path) -> Path:
    """Makes the wheel of a platform tag, or of "any", or the "sdist".

    Raises:
        WheelError: the wheel cannot be built, or does not suit its tag.
        BuildError: the library cannot be compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"ASYNCLLM_WHEEL_PLATFORM": platform}
        if platform in TARGETS:
            library = Path(folder, LIBRARY_NAMES[TARGETS[platform].system])
            compile_library(TARGETS[platform], library)
            environment["ASYNCLLM_WHEEL_LIBRARY"] = str(library)
        kind = "sdist" if platform == "sdist" else "wheel"
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise WheelError(f"{platform}: {done.stderr.strip()[-2000:]}")
        [made] = [path for path in Path(folder).iterdir() if path.suffix in (".whl", ".gz")]
        if platform in TARGETS:
            judge(made, TARGETS[platform])
        dist.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, dist))


def judge(wheel: Path, target: Target) -> None:
    """Checks the wheel's library: what it exports, and what it needs of its system.

    Raises:
        WheelError: a function is missing, or something is needed that the platform may lack.
    """
    name = f"asyncllm/native/{LIBRARY_NAMES[target.system]}"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(name, folder))
        exported, needed = READERS[target.system](library)
    wanted = {f"asyncllm_{function}" for function in SIGNATURES}
    if missing := wanted - exported:
        raise WheelError(f"{wheel.name}: the library lacks {', '.join(sorted(missing))}")
    if target.system == "linux":
        _ask_auditwheel(wheel)
    elif other := [each for each in needed if not re.fullmatch(target.libraries, each)]:
        raise WheelError(f"{wheel.name}: the library needs {', '.join(other)}")


def _ask_auditwheel(wheel: Path) -> None:
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r'platform\s+tag:\s+"manylinux_(\d+)_(\d+)_', said)
    if found is None or (int(found[1]), int(found[2])) > (2, 28):
        raise WheelError(f"{wheel.name}: auditwheel says: {said.strip()}")


def _read_elf(path: Path) -> tuple[set[str], list[str]]:
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        return {each.name for each in symbols if each["st_shndx"] != "SHN_UNDEF"}, []


def _read_macho(path: Path) -> tuple[set[str], list[str]]:
    from macholib.MachO import MachO
    from macholib.SymbolTable import SymbolTable

    library = MachO(str(path))
    symbols = SymbolTable(library).extdefsyms
    needed = [name for _, _, name in library.headers[0].walkRelocatables()]
    return {name.decode().removeprefix("_") for _, name in symbols}, needed


def _read_pe(path: Path) -> tuple[set[str], list[str]]:
    from pefile import PE

    library = PE(str(path))
    exported = {each.name.decode() for each in library.DIRECTORY_ENTRY_EXPORT.symbols}
    return exported, [each.dll.decode() for each in library.DIRECTORY_ENTRY_IMPORT]


READERS = {"linux": _read_elf, "darwin": _read_macho, "win32": _read_pe}
"""By system: reads a library's exported functions and the libraries that it needs. auditwheel
reads the latter on Linux."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help="a tag, any or sdist")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where they are put")
    arguments = parser.parse_args()
    everything = [*TARGETS, "any", "sdist"]
    if unknown := set(arguments.platforms) - set(everything):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(everything)}")
    for platform in arguments.platforms or everything:
        print(make(platform, arguments.dist), flush=True)


if __name__ == "__main__":
    main()
