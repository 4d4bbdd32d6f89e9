"""The kernels and smoke stages of the GPU benchmark, interpreted."""

from __future__ import annotations

import pytest

from benchmarks.common import Report
from benchmarks.gpu import kernels
from benchmarks.gpu.smoke_kernels import checks_of
from benchmarks.gpu.stage import Deadline, Stage


@pytest.mark.slow
def test_first_case_of_every_family() -> None:
    """The kernels stage calls the kernels as they want to be called."""
    wanted = [
        kernels.Family(family.name, dict([next(iter(family.cases.items()))]))
        for family in kernels.families("cpu", 80)
        # A captured launch needs CUDA.
        if not family.name.startswith("a whole decoder")
    ]
    stage = Stage(Report("kernels, interpreted"), Deadline(600))
    kernels.run_families(stage, wanted)
    assert stage.failed == []
    assert [score.value for score, _ in stage.scores.scores] == [0.0] * len(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", checks_of("cpu", 80))
def test_kernels_of_the_smoke_stage(name: str) -> None:
    if name == "a decoder of two KV groups":
        pytest.skip("it asks a GPU for its multiprocessors; test_static_step.py runs it")
    for check in checks_of("cpu", 80)[name]:
        check()
