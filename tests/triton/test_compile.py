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

from asyncllm.gpu.ops.triton.tuning import decode_programs_per_sm
from tests.slow import slow_but
from tests.triton.launches import Build, compile_launch
from tests.triton.variants import SHARED_MEMORY, Variant, variants

REGISTERS = 65536
"""Of a multiprocessor."""

WARPS = {80: 64, 89: 48, 90: 64}
"""Of a multiprocessor."""

PROGRAMS = {
    "decode-head128": {80: 4, 89: 2, 90: 3},
    "decode-shares": {80: 4, 89: 2, 90: 3},
    "merge-shares": {80: 12, 89: 12, 90: 16},
    "prefill-head128": {80: 1, 89: 1, 90: 1},
    "prefill-splits-head128": {80: 1, 89: 1, 90: 1},
    "decode-head512": {80: 2, 89: 1, 90: 2},
    "decode-shares-head512": {80: 2, 89: 1, 90: 2},
    "merge-head512": {80: 12, 90: 12},
    "prefill-head512": {80: 1, 89: 1, 90: 1},
    "prefill-splits-head512": {80: 1, 89: 1, 90: 1},
    "sample-choose-fp32": {80: 4, 90: 4},
}
"""Per multiprocessor, of the kernels that launch shapes and numbers of splits are chosen for, as
Triton 3.7 compiles them."""

SPILLED = {("prefill-rare-head512", 100): 10, ("prefill-window", 80): 36}
"""Bytes and instructions: one address, kept aside over the loop; and nine registers of heads of 128
with a window, at the limit of 255."""


def programs_per_sm(build: Build, warps: int, capability: int) -> int:
    """By registers, of which a warp takes multiples of 256, by shared memory, of which a program
    takes 1 KiB more and a multiprocessor has 1 KiB more than a program may take, and by warps."""
    registers = -(-build.registers * 32 // 256) * 256 * warps
    shared = (SHARED_MEMORY[capability] + 1) * 1024
    return min(REGISTERS // registers, shared // (build.shared + 1024), WARPS[capability] // warps)


def test_splits_are_chosen_for_the_places_of_decode_attention() -> None:
    """But for one more on 9.0 with heads of 128, which a GPU has measured."""
    for name, programs in PROGRAMS.items():
        if name.startswith("decode"):
            head_dim = 512 if name.endswith("head512") else 128
            expected = programs if head_dim == 512 else programs | {90: 4}
            assert expected == {sm: decode_programs_per_sm(sm, head_dim) for sm in programs}


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
    expected = PROGRAMS.get(variant.name, {}).get(variant.capability)
    if expected is not None and triton.__version__.startswith("3.7."):
        warps = launch.options["num_warps"]
        assert programs_per_sm(build, warps, variant.capability) == expected
    hopper = variant.kernel == "prefill_kernel" and variant.capability == 90
    if hopper and "float32" not in variant.name:
        assert build.counts("HGMMA") > 0
        assert build.counts("HMMA") == 0
