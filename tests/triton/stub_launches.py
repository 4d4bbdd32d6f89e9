"""Launches of mixed steps on a driver that does nothing, under Triton's real launch path.

Run as a program by ``test_launcher.py``: libcuda stays loaded.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia

from asyncllm.gpu.ops.triton.launcher import BoundKernel
from tests.triton.small_steps import MODELS, make_step, mixed_step
from tests.triton.stub_cuda import stub_cuda


class Annotations(list[Any]):
    """Triton's, of a kernel's arguments, whose contents C alone can read.

    Attributes:
        passed: whether the kernel has the argument, by its place.
    """

    def __init__(self, signature: list[Any]) -> None:
        super().__init__(annotate(signature))
        self.passed = [kind != "constexpr" for kind in signature]


annotate = nvidia.annotate_arguments


class Handed:
    """What reaches the function in C, as it takes it.

    Attributes:
        launches: grid, stream, function, cooperative, dependent, metadata, scratch memory, and the
            arguments that the kernel has.
    """

    def __init__(self, launch: Any) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self._launch = launch

    def __call__(self, *args: Any) -> None:
        *head, _metadata, _enter, _leave, scratch, profile, annotations, signature, given = args
        taken = [
            value.data_ptr() if isinstance(value, Tensor) else value
            for value, passed in zip(given, annotations.passed, strict=True)
            if passed
        ]
        assert len(taken) == len(signature)
        self.launches.append((*head, scratch, profile, taken))
        self._launch(*args)


def check(name: str, launches: ctypes.c_long, handed: Handed) -> None:
    """After a step of other sizes, each launch and the same one through the JIT."""
    step = make_step(4096, (), torch.bfloat16, **MODELS[name])
    mixed_step(step, 63, 256)
    before = launches.value
    mixed_step(step, 62, 240)
    expected = launches.value - before
    direct, count = BoundKernel.__call__, 0

    def twice(self: BoundKernel, grid: tuple[int, ...], *args: Any) -> None:
        nonlocal count
        direct(self, grid, *args)
        self.launcher.kernel[grid](*args, **self.constants)
        assert handed.launches[-2] == handed.launches[-1], handed.launches[-2:]
        count += 1

    BoundKernel.__call__ = twice
    try:
        mixed_step(step, 61, 230)
    finally:
        BoundKernel.__call__ = direct
    assert count == expected > 12, count


def main() -> None:
    with stub_cuda() as launches, torch.inference_mode():
        active: Any = triton.runtime.driver.active
        utils = active.utils
        handed = utils.launch = Handed(utils.launch)
        nvidia.annotate_arguments = Annotations
        for name in ("window", "hybrid", "experts"):
            check(name, launches, handed)
    print("same")


if __name__ == "__main__":
    main()
