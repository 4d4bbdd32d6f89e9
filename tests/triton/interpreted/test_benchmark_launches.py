"""What the GPU benchmark launches, through the kernels themselves: right inputs, right tables."""

from __future__ import annotations

import pytest
import torch

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention import TritonAttention
from benchmarks.common import Report
from benchmarks.gpu import kernels
from benchmarks.gpu.paged_inputs import PagedInputs, decode_calls, make_inputs, prefill_calls
from benchmarks.gpu.shapes import AttentionLoad
from benchmarks.gpu.smoke_kernels import checks_of
from benchmarks.gpu.stage import Deadline, Stage
from tests.triton.paged import assert_close, attend

CPU = torch.device("cpu")
SIZES = {"heads": 8, "kv_heads": 2, "head_dim": 64}


def make_attention(load: AttentionLoad) -> TritonAttention:
    shape = AttentionShape(load.heads, load.kv_heads, load.head_dim, load.head_dim**-0.5)
    return TritonAttention(shape, torch.bfloat16, CPU, capability=90, num_sms=4)


def check(inputs: PagedInputs, number: int, found: torch.Tensor) -> None:
    load = inputs.load
    queries = inputs.queries[number].unflatten(0, (load.batch, load.queries))
    rows = found.view(load.batch, load.queries, load.heads, load.head_dim)
    for row in range(load.batch):
        k, v = inputs.cache[:, inputs.table(number)[row].long()].flatten(1, 2)[:, : load.kv_len]
        expected = attend(queries[row], k, v, load.head_dim**-0.5, None, None)
        assert_close(rows[row], expected, torch.bfloat16)


@pytest.mark.parametrize("max_len", [256, 1024], ids=["one split", "two splits"])
def test_decode_launches(max_len: int) -> None:
    load = AttentionLoad(3, 1, 89, **SIZES)
    inputs = make_inputs(load, 2, CPU)
    attention = make_attention(load)
    assert attention.splits(load.batch, max_len, None) == {256: 1, 1024: 2}[max_len]
    for number, call in enumerate(decode_calls(attention, inputs, max_len)):
        check(inputs, number, call())


def test_prefill_launches() -> None:
    load = AttentionLoad(2, 40, 30, **SIZES)
    inputs = make_inputs(load, 2, CPU)
    for number, call in enumerate(prefill_calls(make_attention(load), inputs)):
        check(inputs, number, call())


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
