"""Launches past the JIT's wrapper are those that it would have made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from asyncllm.gpu.ops.triton import launcher
from asyncllm.gpu.ops.triton.launcher import BoundKernel, CompiledLaunch, Launcher, with_launcher
from tests.hypothesis_settings import examples
from tests.triton.small_steps import MODELS, make_step, mixed_step

CPU = torch.device("cpu")
DEVICE, STREAM = 4343, 17


class Driver:
    """A driver whose kernels do nothing, below Triton's own binder, look-up and launch.

    Args:
        nested: its launcher hands a kernel's arguments on in one tuple, as Triton's does from 3.7
            on; else it has no function that it hands them to.

    Attributes:
        launches: kernel, what it was compiled for, grid, stream, and its arguments as the driver
            would get them.
        wrapped: how many of them came through the JIT.
        comparing: whether each direct launch is made once more by the JIT, and has to be the same.
    """

    def __init__(self, *, nested: bool) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.wrapped, self.nested, self.comparing = 0, nested, False

    def compile(self, kernel: JITFunction, key: str) -> Any:
        given = sum(not param.is_constexpr for param in kernel.params)

        def run(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            metadata, _, enter, leave, *args = rest
            assert metadata == "packed"
            assert len(args) == len(kernel.params)
            for hook in (enter, leave):
                if hook is not None:
                    hook({})
            plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args[:given]]
            name = kernel.fn.__name__
            self.launches.append((name, function, (x, y, z), stream, plain))

        compiled = SimpleNamespace(
            run=NestedRun(run) if self.nested else run,
            function=key,
            packed_metadata="packed",
            launch_metadata=lambda *_: None,
        )
        kernel.device_caches[DEVICE][0][key] = compiled
        return compiled


class NestedRun:
    """Hands on what ``run`` gets."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, run: Any) -> None:
        def launch(*handed: Any) -> None:
            x, y, z, stream, function, cooperative, *hooks, scratch, args = handed
            assert (cooperative, scratch) == (False, None)
            run(x, y, z, stream, function, *hooks, *args)

        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        hooks, args = rest[:4], rest[4:]
        self.launch(x, y, z, stream, function, False, *hooks, None, args)


@contextmanager
def driving(*, nested: bool = True) -> Iterator[Driver]:
    made, plain = Driver(nested=nested), JITFunction.run
    monkeypatch = pytest.MonkeyPatch()

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        made.wrapped += 1
        return plain(self, *args, **kwargs)

    stub = SimpleNamespace(
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: STREAM,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", stub)
    monkeypatch.setattr(
        JITFunction, "_do_compile", lambda kernel, key, *_: made.compile(kernel, key)
    )
    monkeypatch.setattr(JITFunction, "run", run)
    kept: list[BoundKernel] = []
    launch = BoundKernel.__call__

    def noted(self: BoundKernel, grid: tuple[int, ...], *args: Any) -> None:
        kept.append(self)
        launch(self, grid, *args)
        if made.comparing:
            self.launcher.kernel[grid](*args, **self.constants)
            assert made.launches[-2] == made.launches[-1], "launched otherwise"

    monkeypatch.setattr(BoundKernel, "__call__", noted)
    try:
        with torch.inference_mode():
            yield made
    finally:
        monkeypatch.undo()
        for one in kept:
            one._launches.clear()
            one.launcher.kernel.device_caches.pop(DEVICE, None)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with driving() as made:
        yield made


@with_launcher
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["y"])
def toy_kernel(x, y, count, stride, scale, WIDTH: tl.constexpr):
    pass


MEMORY = torch.zeros(64, dtype=torch.uint8)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64]
POINTERS = st.builds(
    lambda dtype, offset: MEMORY[8 * offset :].view(dtype), st.sampled_from(DTYPES),
    st.sampled_from([0, 1, 2]),
)  # fmt: skip
LAUNCHES = st.tuples(
    st.sampled_from([(1,), (3, 2), (4, 5, 6)]),
    POINTERS,
    POINTERS,
    st.sampled_from([0, 1, 5, 16, 2**31 - 1, 2**31, 2**40]),
    st.sampled_from([1, 2, 16, 17, 2**31]),
    st.sampled_from([1.0, 0.25]),
    st.sampled_from([8, 16]),
    st.sampled_from([4, 8]),
)


@given(st.lists(LAUNCHES, min_size=4, max_size=12), st.booleans())
@examples(60)
def test_a_direct_launch_is_the_one_that_the_jit_makes(launches, nested):
    with driving(nested=nested) as made:
        made.comparing = True
        for grid, *args, width, warps in launches * 2:
            toy_kernel[grid](*args, WIDTH=width, num_warps=warps)
        assert len(made.launches) == 4 * len(launches)


def test_rare_arguments_take_the_path_of_the_jit(driver):
    x, y = MEMORY.view(torch.float32), MEMORY[8:].view(torch.float32)
    usual = (x, y, 5, 16, 1.0)

    def wrapped(*args: Any) -> int:
        before = driver.wrapped
        toy_kernel[(1,)](*args, WIDTH=8)
        return driver.wrapped - before

    assert [wrapped(*usual) for _ in range(3)] == [1, 0, 0]
    assert [wrapped(x, y, count, 16, 1.0) for count in (0, 1, 2**31 - 1)] == [0, 0, 0]
    assert [wrapped(x, y, 2**31, 16, 1.0) for _ in range(2)] == [1, 1]
    assert [wrapped(y, x, 5, 16, 1.0) for _ in range(2)] == [1, 1]
    assert [wrapped(x, y, 5, stride, 1.0) for stride in (1, 17, 1)] == [1, 1, 0]
    assert [wrapped(x.view(torch.int64), y, 5, 16, 1.0) for _ in range(2)] == [1, 0]
    seen: list[Any] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata)

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert wrapped(*usual) == 1
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(seen) == 1
    assert wrapped(*usual) == 0


def test_equal_numbers_of_other_types_have_separate_launches(driver):
    """2 and 2.0 are one key of a dictionary, but an integer and a float to a kernel."""
    x = MEMORY.view(torch.float32)
    driver.comparing = True
    for scale in (2, 2.0, 1, 1.0, True) * 2:
        toy_kernel[(1,)](x, x, 5, 16, scale, WIDTH=8)
        assert [type(each[-1][-1]) for each in driver.launches[-2:]] == [type(scale)] * 2
    bound = {id(toy_kernel.bind(WIDTH=width)) for width in (1, 1.0, True)}
    assert len(bound) == 3


def test_cached_launches_are_bounded(driver, monkeypatch):
    monkeypatch.setattr(launcher, "MAX_LAUNCHES", 3)
    x = MEMORY.view(torch.float32)
    bound = toy_kernel.bind(WIDTH=8)
    for stride in range(20):
        bound((1,), x, x, 5, stride, 1.0)
        assert 1 <= len(bound._launches) <= 3
        toy_kernel.bind(WIDTH=stride)
        assert 1 <= len(toy_kernel._bound_kernels) <= 3


def test_arguments_in_another_order_are_refused():
    @triton.jit
    def mixed(x, WIDTH: tl.constexpr, y):
        pass

    with pytest.raises(TypeError, match="mixed: expected constants behind"):
        Launcher(mixed)
    with pytest.raises(TypeError, match="toy_kernel: expected 5 arguments, tensors before"):
        Launcher(toy_kernel.kernel)[(1,)](MEMORY, 5, MEMORY, 16, 1.0, WIDTH=8)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the stub of libcuda is compiled")
def test_launches_under_the_real_launch_path():
    """In a process of its own, which keeps the stub of libcuda. Kernels are compiled for an H200,
    which takes seconds each where Triton's cache has none."""
    command = [sys.executable, "-m", "tests.triton.stub_launches"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout == "same\n"


class Nested:
    """Triton's launcher, with the arguments of a kernel in one tuple."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.handed: list[tuple[Any, ...]] = []
        self.launch: Callable[..., None] = lambda *args: self.handed.append(args)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        metadata, _, enter, leave, *args = rest
        self.launch(
            x, y, z, stream, function, True, metadata, enter, leave, None, b"i", tuple(args)
        )


class Flat(Nested):
    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, True, None, *rest)


class Scratch(Nested):
    global_scratch_size = 64


class Other(Nested):
    """Of an order that is not known."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(stream, function, x, y, z, *rest)


@pytest.mark.parametrize(
    ("kind", "is_direct"), [(Nested, True), (Flat, True), (Scratch, False), (Other, False)]
)
def test_a_compiled_launch_passes_the_launchers_arguments(kind, is_direct):
    run, arguments = kind(), (10**9, 7, 0.5, None)
    compiled: Any = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0))
    launch = CompiledLaunch.of(compiled, arguments)
    assert not run.handed, "it was launched"
    assert (launch.launch is run.launch) == is_direct
    others = (10**9 + 16, 8, 0.25, None)
    launch.launch(9, 8, 1, 17, *launch.launch_args(others))
    run(9, 8, 1, 17, 5, (4, 1, 0), None, None, None, *others)
    assert run.handed[0] == run.handed[1]


@pytest.mark.parametrize(
    ("name", "prefix", "nested"),
    [
        ("window", 0, True),
        ("window", 3000, False),
        ("whole norms", 3000, True),
        ("hybrid", 0, True),
        ("experts", 0, True),
    ],
)
def test_launches_of_a_mixed_step(name, prefix, nested):
    """None of them goes through the JIT once there was such a step, and in a step of other sizes
    each is as the JIT would make it."""
    with driving(nested=nested) as driver:
        step = make_step(4096, (), torch.bfloat16, **MODELS[name])
        mixed_step(step, 63, 256, prefix)
        driver.launches.clear()
        driver.wrapped = 0
        mixed_step(step, 63, 256, prefix)
        assert driver.wrapped == 0
        kernels = [name for name, *_ in driver.launches]
        assert len(kernels) > 12
        driver.comparing = True
        mixed_step(step, 62, 240, prefix)
        assert driver.wrapped == len(kernels)
        assert [name for name, *_ in driver.launches[-2 * len(kernels) :: 2]] == kernels


def test_numbers_of_a_launch(driver):
    x = MEMORY.view(torch.float32)
    toy_kernel[(2, 3)](x, x, np.int64(7).item(), 16, 0.25, WIDTH=8)
    name, _, grid, stream, args = driver.launches[-1]
    assert (name, grid, stream) == ("toy_kernel", (2, 3, 1), STREAM)
    assert args == [x.data_ptr(), x.data_ptr(), 7, 16, 0.25]
