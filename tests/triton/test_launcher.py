"""Launches past the JIT's wrapper are those that it would have made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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

from asyncllm.core.batch import StepBatch
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.graph.decode_runner import DecodeRunner
from asyncllm.gpu.ops.triton import launcher
from asyncllm.gpu.ops.triton.launch_program import Attend, Launch, Step
from asyncllm.gpu.ops.triton.launcher import BoundKernel, Launcher, launched
from benchmarks.mixed_step import op_by_op
from tests.hypothesis_settings import examples
from tests.triton.test_warm_up import MODELS, make_step

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
    """

    def __init__(self, *, nested: bool) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.wrapped, self.nested = 0, nested

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

    def noted(self: BoundKernel, *args: Any) -> None:
        kept.append(self)
        launch(self, *args)

    monkeypatch.setattr(BoundKernel, "__call__", noted)
    try:
        with torch.inference_mode():
            yield made
    finally:
        monkeypatch.undo()
        for one in kept:
            one._forms.clear()
            one.launcher.kernel.device_caches.pop(DEVICE, None)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with driving() as made:
        yield made


@launched
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
def test_a_direct_launch_is_the_one_that_the_jit_makes(
    launches: list[tuple[Any, ...]], nested: bool
) -> None:
    with driving(nested=nested) as made:
        for grid, *args, width, warps in launches * 2:
            toy_kernel[grid](*args, WIDTH=width, num_warps=warps)
            toy_kernel.kernel[grid](*args, WIDTH=width, num_warps=warps)
            direct, wrapped = made.launches[-2:]
            assert direct == wrapped


def test_rare_arguments_take_the_path_of_the_jit(driver: Driver) -> None:
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


def test_equal_numbers_of_other_types_have_forms_of_their_own(driver: Driver) -> None:
    """2 and 2.0 are one key of a dictionary, but an integer and a float to a kernel."""
    x = MEMORY.view(torch.float32)
    for scale in (2, 2.0, 1, 1.0, True) * 2:
        toy_kernel[(1,)](x, x, 5, 16, scale, WIDTH=8)
        toy_kernel.kernel[(1,)](x, x, 5, 16, scale, WIDTH=8)
        direct, wrapped = driver.launches[-2:]
        assert direct == wrapped
        assert type(direct[-1][-1]) is type(scale)
    bound = {id(toy_kernel.bind(WIDTH=width)) for width in (1, 1.0, True)}
    assert len(bound) == 3


def test_forms_are_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_FORMS", 3)
    x = MEMORY.view(torch.float32)
    bound = toy_kernel.bind(WIDTH=8)
    for stride in range(20):
        bound((1,), x, x, 5, stride, 1.0)
        assert 1 <= len(bound._forms) <= 3
        toy_kernel.bind(WIDTH=stride)
        assert 1 <= len(toy_kernel._bound) <= 3


def test_arguments_in_another_order_are_refused() -> None:
    @triton.jit
    def mixed(x, WIDTH: tl.constexpr, y):
        pass

    with pytest.raises(TypeError, match="mixed: expected constants behind"):
        Launcher(mixed)
    with pytest.raises(TypeError, match="toy_kernel: expected 5 arguments, tensors before"):
        Launcher(toy_kernel.kernel)[(1,)](MEMORY, 5, MEMORY, 16, 1.0, WIDTH=8)


def mixed_step(step: DecodeRunner, decodes: int, prompt: int, prefix: int = 0) -> None:
    """Queues a step of so many decodes and a prompt behind a prefix."""
    batch = InputBatch(decodes + 1, step.info.max_model_len, step.info.kv_groups)
    given = StepBatch(
        step=0,
        req_indices=list(range(decodes + 1)),
        starts=[100] * decodes + [prefix],
        counts=[1] * decodes + [prompt],
        samples=[True] * (decodes + 1),
        num_decodes=decodes,
    )
    host = next(step.host_buffers)
    step.run(host, decodes + 1, batch.prepare(given, CPU, step.block_tables))


@pytest.mark.parametrize(
    ("layers", "prefix", "nested"), [(28, 0, True), (3, 3000, True), (2, 3000, False)]
)
def test_launches_of_a_mixed_step(
    monkeypatch: pytest.MonkeyPatch, layers: int, prefix: int, nested: bool
) -> None:
    """63 decodes and 256 prompt tokens: one launch of each kernel a layer, none of them through the
    JIT once there was such a step, and each as the JIT would make it."""
    with driving(nested=nested) as driver:
        step = make_step(4096, (), torch.bfloat16, num_layers=layers, sliding_layers=())
        mixed_step(step, 63, 256, prefix)
        driver.launches.clear()
        driver.wrapped = 0
        mixed_step(step, 63, 256, prefix)
        assert driver.wrapped == 0
        layer = {
            "norm_kernel": 2, "rope_cache_kernel": 1, "decode_kernel": 1, "prefill_kernel": 1,
            "gated_mul_kernel": 1,
        }  # fmt: skip
        layer |= {"merge_kernel": 1} if prefix else {}
        expected = Counter({name: layers * count for name, count in layer.items()})
        expected += Counter(
            ["norm_kernel", "decode_inputs_kernel", "chunk_kernel", "choose_kernel"]
        )
        assert Counter(name for name, *_ in driver.launches) == expected
        count = layers * (7 if prefix else 6) + 1
        assert_as_the_jit_would(step, driver, monkeypatch, prefix, count)


PROGRAMS = {
    "dense": {"num_layers": 2, "sliding_layers": ()},
    "hybrid": MODELS["hybrid"],
    "experts": MODELS["experts"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_launches_what_its_ops_do(driver: Driver, name: str) -> None:
    """In each step the same kernels, in the same order, with grids and numbers of that step, none
    of them through the JIT."""
    step = make_step(4096, (), torch.bfloat16, **PROGRAMS[name])
    for decodes, prompt, prefix in ((63, 256, 0), (0, 9, 0), (5, 1, 40), (62, 240, 3000)):
        found = []
        for way in (nullcontext(), op_by_op(step)):
            mixed_step(step, decodes, prompt, prefix)
            assert step.mixed.programs
            with way:
                mixed_step(step, decodes, prompt, prefix)
                driver.launches.clear()
                driver.wrapped = 0
                mixed_step(step, decodes, prompt, prefix)
            found.append([apart_from_addresses(launch) for launch in driver.launches])
            assert driver.wrapped == 0
        assert found[0] == found[1]


def apart_from_addresses(launch: tuple[Any, ...]) -> tuple[Any, ...]:
    name, key, grid, stream, args = launch
    return name, key, grid, stream, [each for each in args if not is_address(each)]


def is_address(argument: Any) -> bool:
    """No count or stride is as large."""
    return isinstance(argument, int) and argument > 2**31


@pytest.mark.parametrize(("name", "launches"), [("hybrid", 7 + 9 + 1), ("experts", 2 * 12 + 1)])
def test_arguments_of_a_program(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, name: str, launches: int
) -> None:
    step = make_step(4096, (), torch.bfloat16, **PROGRAMS[name])
    mixed_step(step, 63, 256)
    mixed_step(step, 63, 256)
    assert_as_the_jit_would(step, driver, monkeypatch, launches=launches)


@pytest.mark.parametrize("frozen", ["sizes", "addresses"])
def test_arguments_that_are_frozen_are_noticed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, frozen: str
) -> None:
    """A program that went on with a number of rows, or an input's address, of its first step."""
    step = make_step(4096, (), torch.bfloat16, **PROGRAMS["hybrid"])
    mixed_step(step, 63, 256)
    num_inputs = step.mixed.programs[-1]._num_inputs
    for op in step.mixed.programs[-1]._ops:
        if isinstance(op, Launch):
            op._holes = [
                hole for hole in op._holes if (hole[1] < num_inputs) == (frozen == "sizes")
            ]
            op.forget()
    mixed_step(step, 63, 256)
    with pytest.raises(AssertionError, match="launched"):
        assert_as_the_jit_would(step, driver, monkeypatch, launches=7 + 9 + 1)


@pytest.mark.parametrize("prefix", [0, 3000])
def test_launches_op_by_op(driver: Driver, monkeypatch: pytest.MonkeyPatch, prefix: int) -> None:
    """Those of a step that is no program: a larger one, or of a model that cannot be one."""
    step = make_step(4096, (), torch.bfloat16, num_layers=2, sliding_layers=())
    step.mixed.capacity = 256
    direct, launches = BoundKernel.__call__, 0

    def compared(self: BoundKernel, grid: tuple[int, ...], *args: Any) -> None:
        nonlocal launches
        direct(self, grid, *args)
        self.launcher.kernel[grid](*args, **self.constants)
        assert driver.launches[-2] == driver.launches[-1]
        launches += 1

    mixed_step(step, 63, 256, prefix)
    monkeypatch.setattr(BoundKernel, "__call__", compared)
    driver.wrapped = 0
    mixed_step(step, 62, 240, prefix)
    assert driver.wrapped == launches == (2 * 6 + 4 if not prefix else 2 * 7 + 4)


def assert_as_the_jit_would(
    step: DecodeRunner,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    prefix: int = 0,
    launches: int = 0,
) -> None:
    """Each op of the program launches what it does when the JIT looks at it."""
    compared = 0

    def through_the_jit(self: BoundKernel, grid: tuple[int, ...], *args: Any) -> None:
        self.launcher.kernel[grid](*args, **self.constants)

    def compare(op: Any, call: Any) -> Any:
        def run(self: Any, now: Step) -> None:
            nonlocal compared
            first = len(driver.launches)
            call(self, now)
            direct = driver.launches[first:]
            slow = Step(now.sizes, now.plans, now.inputs, direct=False)
            with monkeypatch.context() as patch:
                patch.setattr(BoundKernel, "__call__", through_the_jit)
                call(self, slow)
            assert driver.launches[first:] == direct * 2, "launched otherwise"
            compared += len(direct)

        return run

    for op in (Launch, Attend):
        monkeypatch.setattr(op, "__call__", compare(op, op.__call__))
    driver.wrapped = 0
    mixed_step(step, 62, 240, prefix)
    assert compared == driver.wrapped == launches


def test_numbers_of_a_launch(driver: Driver) -> None:
    """What is compared above is what the kernel gets."""
    x = MEMORY.view(torch.float32)
    toy_kernel[(2, 3)](x, x, np.int64(7).item(), 16, 0.25, WIDTH=8)
    name, _, grid, stream, args = driver.launches[-1]
    assert (name, grid, stream) == ("toy_kernel", (2, 3, 1), STREAM)
    assert args == [x.data_ptr(), x.data_ptr(), 7, 16, 0.25]
