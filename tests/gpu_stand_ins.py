"""A CPU clock and small models for tests of the GPU benchmarks."""

from __future__ import annotations

import dataclasses
import time

from benchmarks.common import Report
from benchmarks.gpu.clock import DeviceMemory, DeviceSpan
from benchmarks.gpu.engine import Plan
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.shapes import ModelShape
from benchmarks.gpu.stage import Deadline, Stage
from benchmarks.gpu.workload import mixed_lengths

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96}
TINY = ModelShape(
    "tiny Qwen", "Qwen3ForCausalLM", **SIZES, vocab=512, tied=True, itemsize=4, context=256
)
TINY_LLAMA = ModelShape(
    "tiny Llama", "LlamaForCausalLM", **SIZES, vocab=300, tied=False, itemsize=4, context=256
)


class HostClock:
    """What a CUDA clock says, measured on the CPU, or made up where a CPU has nothing."""

    def __init__(self) -> None:
        self.released = 0

    def median(self, calls, *, graph=True) -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - began) / len(calls)

    def copy_bandwidth(self) -> float:
        return 1e10

    def memory(self) -> DeviceMemory:
        return DeviceMemory(0, 0, 0)

    def release(self) -> None:
        self.released += 1

    def utilization(self) -> float | None:
        return None

    def trace(self, work) -> list[DeviceSpan]:
        """Twice a kernel, and as long nothing."""
        work()
        return [DeviceSpan(0.0, 1e-3, "a_kernel"), DeviceSpan(3e-3, 4e-3, "a_kernel")]

    def wake_up(self) -> tuple[float, float]:
        return 3e-4, 2e-4


def tiny_plan(**changes) -> Plan:
    return dataclasses.replace(
        Plan(
            device="cpu",
            small=TINY,
            large=TINY_LLAMA,
            small_batches=((1, Goal("at most", 1e9)), (4, None)),
            large_batches=((2, Goal("at most", 0.0)),),
            prompt=20,
            steps=6,
            busy_batch=4,
            max_len=128,
            token_budget=64,
            workload=lambda: mixed_lengths(6, shortest=4, longest=20, highest_token=500),
            graphs=False,
            settings={"num_threads": 1, "num_blocks": 64, "max_num_seqs": 8},
        ),
        **changes,
    )


def make_stage(seconds: float = 300.0, **options) -> Stage:
    return Stage(Report("test"), Deadline(seconds), **options)


def figures(stage: Stage) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in stage.report.figures}
