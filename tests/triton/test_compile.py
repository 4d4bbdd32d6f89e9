"""Compiles the kernels for NVIDIA GPUs without one, and reads what the compiler made.

``pytest -n 2`` halves the time; Triton's cache makes a second run short.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

import triton

from asyncllm.gpu.ops.triton.tuning import decode_programs
from tests.slow import slow_but
from tests.triton.launches import Build, compile_launch
from tests.triton.variants import SHARED_MEMORY, Variant, variants

REGISTERS = 65536
"""Of a multiprocessor."""

WARPS = {80: 64, 89: 48, 90: 64}
"""Of a multiprocessor."""

RESOURCES = {
    ("decode-head128", 80): (119, 39_424, 4),
    ("decode-shares", 80): (119, 39_424, 4),
    ("merge-shares", 80): (40, 2_048, 12),
    ("prefill-head128", 80): (216, 66_048, 1),
    ("prefill-splits-head128", 80): (255, 66_048, 1),
    ("decode-head512", 80): (209, 82_944, 2),
    ("decode-shares-head512", 80): (212, 82_944, 2),
    ("merge-head512", 80): (40, 0, 12),
    ("prefill-head512", 80): (228, 102_400, 1),
    ("prefill-splits-head512", 80): (255, 102_400, 1),
    ("sample-choose-fp32", 80): (110, 8_192, 4),
    ("decode-head128", 89): (119, 39_424, 2),
    ("decode-shares", 89): (119, 39_424, 2),
    ("merge-shares", 89): (40, 2_048, 12),
    ("prefill-head128", 89): (199, 49_408, 1),
    ("prefill-splits-head128", 89): (219, 65_536, 1),
    ("decode-head512", 89): (231, 83_200, 1),
    ("decode-shares-head512", 89): (222, 83_200, 1),
    ("prefill-head512", 89): (144, 100_352, 1),
    ("prefill-splits-head512", 89): (182, 100_352, 1),
    ("decode-head128", 90): (118, 39_424, 4),
    ("decode-shares", 90): (120, 39_424, 4),
    ("merge-shares", 90): (32, 2_048, 16),
    ("prefill-head128", 90): (182, 98_816, 1),
    ("prefill-splits-head128", 90): (167, 98_816, 1),
    ("decode-head512", 90): (215, 83_200, 2),
    ("decode-shares-head512", 90): (226, 83_200, 2),
    ("merge-head512", 90): (40, 0, 12),
    ("prefill-head512", 90): (251, 196_608, 1),
    ("prefill-splits-head512", 90): (254, 196_608, 1),
    ("sample-choose-fp32", 90): (111, 8_192, 4),
}
"""Registers per thread, bytes of shared memory and programs per multiprocessor of the kernels that
launch shapes and numbers of splits are chosen for, as Triton 3.7 compiles them."""

SPILLED = {("prefill-rare-head512", 100): 10, ("prefill-window", 80): 36}
"""Bytes and instructions: one address, kept aside over the loop; and nine registers of heads of 128
with a window, at the limit of 255."""


def programs_per_sm(build: Build, warps: int, capability: int) -> int:
    """By registers, of which a warp takes multiples of 256, by shared memory, of which a program
    takes 1 KiB more and a multiprocessor has 1 KiB more than a program may take, and by warps."""
    registers = -(-build.registers * 32 // 256) * 256 * warps
    shared = (SHARED_MEMORY[capability] + 1) * 1024
    return min(REGISTERS // registers, shared // (build.shared + 1024), WARPS[capability] // warps)


def test_the_table_has_the_places_that_splits_are_chosen_for() -> None:
    for (name, capability), (*_, programs) in RESOURCES.items():
        if name.startswith("decode"):
            head_dim = 512 if name.endswith("head512") else 128
            assert programs == decode_programs(capability, head_dim)
        if name.startswith("prefill"):
            assert programs == 1


def test_the_list_stays_short() -> None:
    names = [str(variant) for variant in variants()]
    assert len(names) == len(set(names)) <= 185


VARIANTS = variants()
COMMON = [one for one in reversed(VARIANTS) if one.capability == 90 and not one.rare]
OFTEN = {one.kernel: one for one in sorted(COMMON, key=lambda one: one.name.endswith("head128"))}
"""One of each kernel, with heads of 128 where it has heads."""


@pytest.mark.parametrize("variant", slow_but(VARIANTS, *OFTEN.values()), ids=str)
def test_compiles(variant: Variant, tmp_path: Path) -> None:
    launch = variant.launch()
    build = compile_launch(launch, variant.capability, tmp_path)
    print(f"{variant}: {build.registers} registers, {build.shared} bytes, {build.spills} spilled")
    assert build.spills <= SPILLED.get((variant.name, variant.capability), 0)
    assert build.shared <= SHARED_MEMORY[variant.capability] * 1024
    assert build.registers * 32 * launch.options["num_warps"] <= REGISTERS
    expected = RESOURCES.get((variant.name, variant.capability))
    if expected is not None and triton.__version__.startswith("3.7."):
        programs = programs_per_sm(build, launch.options["num_warps"], variant.capability)
        assert (build.registers, build.shared, programs) == expected
    hopper = variant.kernel == "prefill_kernel" and variant.capability == 90
    if hopper and "float32" not in variant.name:
        assert build.counts("HGMMA") > 0
        assert build.counts("HMMA") == 0
