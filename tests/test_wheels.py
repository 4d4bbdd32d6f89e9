"""Wheels of other platforms: contents, needs and equal results."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from asyncllm.native.build import LIBRARY_NAMES, LIBRARY_PATH, BuildError, build
from tests.native_library import ISAS, compiler, link, run_fuzz
from tools import wheels

ROOT = Path(__file__).parent.parent
HERE = f"manylinux_2_28_{platform.machine()}"
MADE = "WHEELS"
"""The environment variable that names a folder of wheels that have been made already."""
ROUNDS = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with this machine's wheel."""
    if (folder := os.environ.get(MADE)) is not None:
        return Path(folder)
    pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("wheels")
    wheels.make(HERE, folder)
    return folder


def library_of(folder: Path, tag: str, to: Path) -> Path:
    """Takes the library out of the wheel of that tag."""
    [wheel] = folder.glob(f"*-{tag}.whl")
    name = LIBRARY_NAMES[wheels.TARGETS[tag].system]
    with zipfile.ZipFile(wheel) as archive:
        to.write_bytes(archive.read(f"asyncllm/native/{name}"))
    return to


def test_a_wheel_for_each_system_that_has_native_ops() -> None:
    assert {target.system for target in wheels.TARGETS.values()} == set(LIBRARY_NAMES)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extra = project["project"]["optional-dependencies"]["wheels"]
    # Another compiler may round differently, and its bytes are others.
    assert any(each.startswith("ziglang==") for each in extra)


def test_a_system_without_native_ops_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="linux, darwin, win32, and this is aix"):
        build(tmp_path / "out.so", compiler=["c++"], system="aix")


def test_a_wheel_that_suits_no_old_system_is_refused(tmp_path: Path) -> None:
    """The library of this machine's compiler and C library, in a wheel."""
    pytest.importorskip("auditwheel")
    if ISAS == [] or os.confstr("CS_GNU_LIBC_VERSION") <= "glibc 2.28":
        pytest.skip("no native library, or one of an old system")
    wheel = tmp_path / f"asyncllm-0-py3-none-{HERE}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(LIBRARY_PATH, f"asyncllm/native/{LIBRARY_PATH.name}")
        tags = f"Wheel-Version: 1.0\nTag: py3-none-{HERE}\n"
        archive.writestr("asyncllm-0.dist-info/WHEEL", tags)
        archive.writestr("asyncllm-0.dist-info/RECORD", f"asyncllm/native/{LIBRARY_PATH.name},,\n")
    with pytest.raises(wheels.WheelError, match=r"platform\s+tag: \"manylinux_2_3"):
        wheels.judge(wheel, wheels.TARGETS[HERE])


@pytest.mark.slow
def test_the_wheels_library_has_the_bits_of_gccs(made: Path, tmp_path: Path) -> None:
    """By every op of the fuzz, on each instruction set that the machine has."""
    library, program = tmp_path / "libops.so", tmp_path / "fuzz"
    shutil.copy(LIBRARY_PATH, library)
    link(program, library, compiler(), ["-O0"])
    expected = {isa: run_fuzz(program, 100, ROUNDS, isa) for isa in ISAS}
    library.unlink()
    library_of(made, HERE, library)
    assert {isa: run_fuzz(program, 100, ROUNDS, isa) for isa in expected} == expected
    # Results of the fuzz tell the sets apart, but for "avx512bf16", which has those of "avx512".
    expected.pop("avx512bf16", None)
    assert len(set(expected.values())) == len(expected)


@pytest.mark.slow
def test_the_native_suite_passes_on_the_wheel(made: Path, tmp_path: Path) -> None:
    library = library_of(made, HERE, tmp_path / LIBRARY_PATH.name)
    tests = [str(Path(__file__).parent / f"test_native{name}.py") for name in ("", "_sampling")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=os.environ | {"NATIVE_LIBRARY": str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_arm_has_the_bits_of_gccs(tmp_path: Path) -> None:
    """Run by QEMU."""
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed")
    gcc, library, program = ["aarch64-linux-gnu-g++"], tmp_path / "libops.so", tmp_path / "fuzz"
    build(library, compiler=gcc, machine="aarch64", extra_flags=["-O1"])
    link(program, library, gcc, ["-O1"])
    emulator = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
    expected = {isa: run_fuzz(program, 1, 2, isa, *emulator) for isa in ("neon", "baseline")}
    tag = "manylinux_2_28_aarch64"
    if (folder := os.environ.get(MADE)) and list(Path(folder).glob(f"*-{tag}.whl")):
        library.unlink()
        library_of(Path(folder), tag, library)
    else:
        pytest.importorskip("ziglang")
        wheels.compile_library(wheels.TARGETS[tag], library)
    assert {isa: run_fuzz(program, 1, 2, isa, *emulator) for isa in expected} == expected


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(made: Path, tmp_path: Path, monkeypatch) -> None:
    """The second without what the compiler keeps of the first."""
    pytest.importorskip("ziglang")
    for cache in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        monkeypatch.setenv(cache, str(tmp_path / "cache"))
    [first] = made.glob(f"*-{HERE}.whl")
    second = wheels.make(HERE, tmp_path / "dist")
    assert second.name == first.name
    assert second.read_bytes() == first.read_bytes()


@pytest.mark.slow
def test_threads_of_other_systems(tmp_path: Path) -> None:
    """macOS' part of ``system.h``, which is POSIX's alone, compiled here and run by the fuzz."""
    library, program = tmp_path / "libops.so", tmp_path / "fuzz"
    build(library, compiler=compiler(), only_isas=(), extra_flags=["-O1", "-U__linux__"])
    names = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    assert "pthread_cond_wait" in names
    assert "syscall" not in names
    link(program, library, compiler(), ["-O0"])
    run_fuzz(program, 1, 8, "baseline")
