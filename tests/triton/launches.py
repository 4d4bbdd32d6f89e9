"""Recording kernel launches, and compiling what was recorded for a GPU that is not there."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """A kernel as it would be launched: its grid, its arguments by name, and Triton's options."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Build:
    """What the compiler reports of one kernel.

    Attributes:
        shared: bytes of shared memory per program.
        registers: per thread.
        spills: bytes of local memory per thread, and its instructions in the machine code.
    """

    name: str
    shared: int
    registers: int
    spills: int
    sass: str

    def counts(self, instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}\b", self.sass))


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Notes how kernels are launched, in place of launching them."""
    launches: list[Launch] = []

    def noted(
        kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **constants: Any
    ) -> None:
        assert all(size > 0 for size in grid), grid
        options = {
            name: constants.pop(name) for name in ("num_warps", "num_stages") & constants.keys()
        }
        bound = inspect.signature(kernel.fn).bind(*args, **constants)
        bound.apply_defaults()
        launches.append(Launch(kernel, grid, dict(bound.arguments), options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", noted)
        yield launches


def compile_launch(launch: Launch, capability: int, directory: Path) -> Build:
    """Compiles a launch as Triton would on a GPU of this capability, and disassembles it."""
    signature, constexprs, attributes = _specialise(launch)
    source = ASTSource(launch.kernel, signature, constexprs, attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=dict(launch.options))
    name = launch.kernel.fn.__name__
    path = directory / f"{name}-{compiled.hash}.cubin"
    path.write_bytes(compiled.asm["cubin"])
    registers, local = _resources(path)
    sass = _tool("nvdisasm", "-c", str(path))
    spilled = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    return Build(name, compiled.metadata.shared, registers, local + spilled, sass)


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """As Triton does at a launch: ones become constants, multiples of 16 are marked."""
    signature, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        one = value == 1 if isinstance(value, int) else False
        if parameter.is_constexpr or value is None or (one and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constexprs[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            marked = not parameter.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
            marked = False
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            marked = value % 16 == 0 and not parameter.do_not_specialize
        if marked:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constexprs, attributes


def _resources(cubin: Path) -> tuple[int, int]:
    """Registers per thread, and bytes of stack and local memory."""
    report = _tool("cuobjdump", "-res-usage", str(cubin))
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    assert found, report
    return int(found[1]), int(found[2]) + int(found[3])


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout
