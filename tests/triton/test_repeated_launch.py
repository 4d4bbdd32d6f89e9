"""RepeatedLaunch: when a launch goes through Triton's JIT, and with which arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

from asyncllm.gpu.ops.triton.paged_attention import RepeatedLaunch

GRID = (4, 2, 1)


class Compiled:
    """A compiled kernel, which takes constants by position."""

    def __init__(self, launches: list[tuple[object, ...]]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self._launches.append(("compiled", grid, *arguments))


class Kernel:
    """A kernel of Triton, compiled or interpreted, that notes its launches."""

    arg_names = ("out", "count", "KEYS", "WIDE")

    def __init__(self, *, interpreted: bool = False) -> None:
        self.launches: list[tuple[object, ...]] = []
        self._compiled = None if interpreted else Compiled(self.launches)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: object, **named: object) -> Compiled | None:
            self.launches.append(("jit", grid, *arguments, named))
            return self._compiled

        return launch


def launch_of(kernel: Kernel) -> RepeatedLaunch:
    return RepeatedLaunch(kernel, GRID, {"WIDE": True, "KEYS": 64}, num_warps=4)


NAMED = {"WIDE": True, "KEYS": 64, "num_warps": 4}


def test_later_layers_launch_what_the_first_compiled():
    kernel = Kernel()
    launch = launch_of(kernel)
    for out in ("first", "second", "third"):
        launch(out, 7, aligned=True)
    assert kernel.launches == [
        ("jit", GRID, "first", 7, NAMED),
        ("compiled", GRID, "second", 7, 64, True),
        ("compiled", GRID, "third", 7, 64, True),
    ]


def test_unaligned_tensors_always_go_through_the_jit():
    kernel = Kernel()
    launch = launch_of(kernel)
    for aligned in (False, True, False, True):
        launch("out", 7, aligned=aligned)
    assert [way for way, *_ in kernel.launches] == ["jit", "jit", "jit", "compiled"]


def test_the_interpreter_runs_every_launch():
    kernel = Kernel(interpreted=True)
    launch = launch_of(kernel)
    for _ in range(3):
        launch("out", 7, aligned=True)
    assert kernel.launches == [("jit", GRID, "out", 7, NAMED)] * 3
