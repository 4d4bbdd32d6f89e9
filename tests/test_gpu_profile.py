"""The profile stage of the GPU benchmarks on the CPU, with made-up traces."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.clock import DeviceSpan
from benchmarks.gpu.kernel_table import KernelRow, kernel_table, short_name
from benchmarks.gpu.profile import ProfileBench, ProfilePlan
from tests.gpu_stand_ins import HostClock, figures, make_stage, tiny_plan


def test_a_trace_by_kernel() -> None:
    spans = [
        DeviceSpan(0.0, 1.0, "norm_kernel"),
        # Beside it, and beyond.
        DeviceSpan(0.5, 3.0, "void gemm<float, 3>(int)"),
        DeviceSpan(3.5, 4.5, "norm_kernel"),
        DeviceSpan(4.5, 5.0, "void gemm<half, 4>(int)"),
    ]
    assert kernel_table(spans[::-1]) == [
        KernelRow("gemm", 2, 1.5, 0.6, 0.0),
        KernelRow("norm_kernel", 2, 1.0, 0.4, 0.25),
    ]
    assert kernel_table([]) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decode_kernel", "decode_kernel"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        (
            "void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4, at::native::"
            "CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, float)",
            "vectorized_elementwise_kernel",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(int)",
            "cutlass_80_wmma_tensorop_bf16_s161616gemm",
        ),
        ("nvjet_hsh_64x8_64x16_1x4_h_bz_splitK_TNT", "nvjet_hsh_64x8_64x16_1x4_h_bz_splitK_TNT"),
        ("x" * 90, "x" * 48),
    ],
)
def test_names_without_templates(name: str, expected: str) -> None:
    assert short_name(name) == expected


class Tracing(HostClock):
    """A kernel and a half for each thing that is traced."""

    def trace(self, work) -> list[DeviceSpan]:
        work()
        spans = [DeviceSpan(i / 1e3, (i + 0.5) / 1e3, f"kernel_{i % 20}") for i in range(40)]
        return [*spans, DeviceSpan(0.04, 0.06, "decode_kernel")]


def test_steps_are_traced_while_they_run(tmp_path: Path) -> None:
    stage = make_stage()
    plan = ProfilePlan(
        tiny_plan(max_len=200), batches=(1, 3), truncated_batch=2, steps=4, prompts=(20, 5)
    )
    asyncio.run(ProfileBench(stage, Tracing(), plan, tmp_path).run())
    assert (stage.failed, stage.skipped) == ([], [])
    found = figures(stage)
    notes = {figure.name: figure.note for figure in stage.report.figures}
    for name in (
        "decode steps of 1 rows",
        "decode steps of 3 rows",
        "decode steps of 2 rows, top_k 20, top_p 0.95",
        "2 rows decode and prompts come",
    ):
        steps, mixed = (int(word) for word in notes[f"{name}, kernels a step"].split()[::2][:2])
        assert steps >= 4
        assert found[f"{name}, kernels a step"] == 41 / steps
        assert (mixed > 0) == ("prompts" in name)
        assert found[f"{name}, busy"] == pytest.approx(2 / 3)
        assert found[f"{name}: decode_kernel"] == pytest.approx(0.02)
        assert notes[f"{name}: decode_kernel"].startswith("1 times, 50.0%, 500.0 µs of nothing")
        assert notes[f"{name}: the others"] == "14 times, 17.5%, 7 kernels"
