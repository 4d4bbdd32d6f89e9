"""Launches of mixed steps on a driver that does nothing, under Triton's real launch path.

Run as a program by ``test_stub_driver.py``: libcuda stays loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia

from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.ops.triton.launch_program import Attend, Launch, Step
from benchmarks.mixed_step import DECODES, make_runner, mixed_step, through_the_jit
from benchmarks.stub_cuda import StubDriver, stub_cuda

LAYERS = {
    "qwen3": [6, 6],
    "qwen3.5": [9, 9, 9, 7],
    "qwen3-moe": [11, 11],
    "qwen3.5-moe": [15, 15, 15, 13],
}
"""Launches of each layer, in a step of each family; four more are around them."""


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


@contextmanager
def compared(handed: Handed) -> Iterator[list[int]]:
    """Each op of a program runs a second time, through the JIT; yields how many launches were."""
    count = [0]

    def compare(call: Any) -> Any:
        def run(self: Any, now: Step) -> None:
            first = len(handed.launches)
            call(self, now)
            direct = handed.launches[first:]
            with through_the_jit():
                call(self, Step(now.sizes, now.plans, now.inputs, direct=False))
            assert handed.launches[first:] == direct * 2, (direct, handed.launches[first:])
            count[0] += len(direct)

        return run

    calls: dict[Any, Any] = {op: op.__call__ for op in (Launch, Attend)}
    for op, call in calls.items():
        op.__call__ = compare(call)
    try:
        yield count
    finally:
        for op, call in calls.items():
            op.__call__ = call


def check(family: str, stub: StubDriver, handed: Handed) -> None:
    a_step = sum(LAYERS[family]) + 4
    runner = make_runner(family, len(LAYERS[family]))
    inputs = InputBatch(DECODES + 1, 4096, runner.info.kv_groups)
    for _ in range(2):
        mixed_step(runner, inputs)
    before = stub.launches
    mixed_step(runner, inputs)
    assert stub.launches - before == a_step, stub.launches - before
    with compared(handed) as count:
        mixed_step(runner, inputs)
    assert count[0] == a_step - 3, count


def main() -> None:
    with stub_cuda() as stub, torch.inference_mode():
        active: Any = triton.runtime.driver.active
        utils = active.utils
        handed = utils.launch = Handed(utils.launch)
        nvidia.annotate_arguments = Annotations
        for family in LAYERS:
            check(family, stub, handed)
    print("same")


if __name__ == "__main__":
    main()
