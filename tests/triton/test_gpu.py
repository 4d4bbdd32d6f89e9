"""The checks of the kernels on a GPU: those of the benchmark's kernels stage, and a few more.

They skip where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from asyncllm.gpu.ops.triton import expert_pairs, sampling
from asyncllm.gpu.ops.triton.op_set import TritonOps
from benchmarks.gpu.kernels import families
from tests.exact_experts import ROUTINGS
from tests.gpu_turns import beside_others  # noqa: F401 - pytest finds a fixture by its name
from tests.triton import checks

HAS_GPU = torch.cuda.is_available()
MAJOR, MINOR = torch.cuda.get_device_capability() if HAS_GPU else (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("beside_others"),
]


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{family.name}: {name}")
        for family in families("cuda", 10 * MAJOR + MINOR)
        for name, check in family.cases.items()
    ],
)
def test_kernel(check: Callable[[], object]) -> None:
    check()


@pytest.mark.parametrize("clamped", [False, True], ids=["SwiGLU", "clamped"])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_experts_in_float32(tokens: int, clamped: bool) -> None:
    """Nine tokens have small tiles, seventy large ones."""
    options = {"tokens": tokens, "clamped": clamped, "biased": clamped, "count": 4}
    checks.check_experts(TritonOps(), "cuda", dtype=torch.float32, **options)


def test_sum_of_experts_in_float32() -> None:
    checks.check_sum_experts(expert_pairs, torch.float32, "cuda")


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "groups"])
def test_routing(name: str) -> None:
    checks.check_routing(TritonOps(), ROUTINGS[name], "cuda")


def test_top_k() -> None:
    checks.check_top_k(sampling.sample, "cuda")
