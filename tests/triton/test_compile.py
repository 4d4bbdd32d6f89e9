"""Compiles the kernels for NVIDIA GPUs without one, and reads what the compiler made.

``pytest -n 2`` halves the time; Triton's cache makes a second run short.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from tests.triton.launches import compile_launch
from tests.triton.variants import SHARED_MEMORY, Variant, variants

REGISTERS = 65536
"""Of a multiprocessor."""


def test_the_list_stays_short() -> None:
    names = [str(variant) for variant in variants()]
    assert len(names) == len(set(names)) <= 120


def marked(variant: Variant) -> Any:
    """sm_90 with every run, the other architectures when asked for."""
    return pytest.param(variant, marks=() if variant.capability == 90 else pytest.mark.slow)


@pytest.mark.parametrize("variant", [marked(variant) for variant in variants()], ids=str)
def test_compiles(variant: Variant, tmp_path: Path) -> None:
    launch = variant.launch()
    build = compile_launch(launch, variant.capability, tmp_path)
    print(f"{variant}: {build.registers} registers, {build.shared} bytes, {build.spills} spilled")
    assert build.spills == 0
    assert build.shared <= SHARED_MEMORY[variant.capability] * 1024
    assert build.registers * 32 * launch.options["num_warps"] <= REGISTERS
    hopper = variant.kernel == "prefill_kernel" and variant.capability == 90
    if hopper and "float32" not in variant.name:
        assert build.counts("HGMMA") > 0
        assert build.counts("HMMA") == 0
