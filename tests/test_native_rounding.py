"""Weights rounded by the native op: the bits of the torch reference, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.quantise import QUANTISERS
from tests.native_library import context, each_isa, needs_native

pytestmark = [
    needs_native,
    pytest.mark.usefixtures("one_thread"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def awkward(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal rows of many sizes; some of zeros, of one sign, of outliers, of ties, and some with
    numbers whose inverse is infinite."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    sizes = torch.randint(-20, 10, (rows, 1), generator=generator)
    values *= torch.pow(2.0, sizes.float())
    values[1] = 0.0
    values[2] = values[2].abs() + 1.0
    values[3] = -values[3].abs()
    values[4, 5] = 3e4
    values[5] = torch.arange(columns) % 31 / 2.0 - 7.0
    values[6] = (torch.arange(columns) % 5 - 2.0) * 2.0**-24
    values[7, : columns // 2] = 0.0
    if dtype != torch.float16:
        values[8] *= 1e-38
        values[9] = values[9].sign() * 2.0**-133
        values[10] *= 1e30
    return values.to(dtype)


def assert_same(found: LinearWeights, expected: LinearWeights) -> None:
    assert found.scales is not None
    assert expected.scales is not None
    assert (found.scheme, found.scale_block) == (expected.scheme, expected.scale_block)
    assert torch.equal(found.values, expected.values)
    torch.testing.assert_close(found.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.zeros, expected.zeros, rtol=0, atol=0)
    assert found.bias is expected.bias


@pytest.mark.parametrize("name", QUANTISERS)
@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_has_the_bits_of_the_reference(name, isa, dtype):
    ops, reference = NativeOps(context(2, isa)), QUANTISERS[name]
    for seed, (rows, columns) in enumerate([(40, 90), (16, 2), (24, 544)]):
        print("seed", seed)
        values = awkward(max(rows, 11), max(columns, 10), dtype, seed)[:rows, :columns]
        weights = LinearWeights(values, torch.ones(rows))
        assert_same(ops.quantisers[name].linear(weights), reference.linear(weights))
        assert_same(ops.quantisers[name].output_head(weights), reference.output_head(weights))


@pytest.mark.parametrize("name", QUANTISERS)
@each_isa
def test_non_finite_inputs_spoil_only_their_scale(name, isa):
    values = awkward(12, 96, torch.float32, 5)
    values[3, 40], values[4, 40], values[5, 95], values[6, 3] = torch.nan, torch.inf, -torch.inf, 1
    spoilt = LinearWeights(values)
    found = NativeOps(context(1, isa)).quantisers[name].linear(spoilt)
    expected = QUANTISERS[name].linear(spoilt)
    assert found.scales is not None
    assert expected.scales is not None
    torch.testing.assert_close(found.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    finite = found.scales.isfinite()
    assert int((~finite).sum()) == 3
    elements = finite.repeat_interleave(found.values.shape[1] // finite.shape[1], 1)
    assert torch.equal(found.values[elements], expected.values[elements])


def test_non_contiguous_rows_are_quantised():
    values = awkward(24, 128, torch.bfloat16, 6)
    ops = NativeOps(context(2))
    for view in (values[::2], values[:, 32:96], values.t()):
        weights = LinearWeights(view)
        for name, reference in QUANTISERS.items():
            found = ops.quantisers[name].linear(weights)
            assert_same(found, reference.linear(LinearWeights(view.contiguous())))


def test_an_odd_number_of_inputs_is_refused():
    with pytest.raises(ModelLoadError, match="5 x 33 in 4 bits: expected an even number of inputs"):
        NativeOps(context(1)).quantisers["int4"].linear(LinearWeights(torch.ones(5, 33)))
