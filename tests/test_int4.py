"""Grouped quantised weights: rounding, exact products and accepted forms."""

from __future__ import annotations

import pytest
import torch

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops import quantise
from asyncllm.gpu.ops.linear_weights import LinearWeights, WeightSpec
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.quantise import INT4_GROUP_SIZE, quantise_int4
from tests.linear_weights import dequantised, rounded
from tests.native_library import ISAS, context, each_isa, needs_native


def bundle(
    rows: int, columns: int, group: int, bits: int, *, zeros: bool, scales: torch.dtype, seed: int
) -> LinearWeights:
    """Random integers of the whole range."""
    generator = torch.Generator().manual_seed(seed)
    grid = (rows, -(-columns // group))
    scale = (torch.rand(grid, generator=generator) * 0.1 + 0.01).to(scales)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    values = torch.randint(low, high, (rows, columns), generator=generator)
    zero = torch.randint(low, high, grid, generator=generator) if zeros else None
    if bits == 4:
        values = (values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8)
        zero = torch.full(grid, 8) if zero is None else zero
    else:
        values = values.to(torch.int8)
    bias = torch.randn(rows, generator=generator)
    scheme = "int4" if bits == 4 else "int8"
    return LinearWeights(values, bias, scheme, scale, (1, group), zero)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_group_rounding_error_is_bounded(monkeypatch, dtype):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(40, 90, generator=generator).to(dtype)
    values[3] = 0.0
    values[5, 7] = 100.0
    values[6] = values[6].abs() + 1.0
    values[7] *= 1e-30 if dtype != torch.float16 else 0.0
    whole = quantise_int4(LinearWeights(values, torch.ones(40)))
    monkeypatch.setattr(quantise, "MAX_CHUNK_ELEMENTS", 1000)
    weights = quantise_int4(LinearWeights(values, torch.ones(40)))
    assert weights.scales is not None
    assert weights.zeros is not None
    assert (weights.scheme, weights.scale_block, weights.shape) == (
        "int4",
        (1, INT4_GROUP_SIZE),
        (40, 90),
    )
    assert weights.scales.shape == weights.zeros.shape == (40, 3)
    for name in ("values", "scales", "zeros"):
        assert torch.equal(getattr(weights, name), getattr(whole, name)), "chunks"
    found = dequantised(weights)
    assert not found[3].any()
    for group in range(3):
        part = values[:, group * INT4_GROUP_SIZE : (group + 1) * INT4_GROUP_SIZE].double()
        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        error = (
            (found[:, group * INT4_GROUP_SIZE : (group + 1) * INT4_GROUP_SIZE] - part)
            .square()
            .sum(1)
        )
        # Half a step for the element, half for the zero point, and a scale of 8 bits.
        step = (high - low).squeeze(1) / 15.0
        assert bool((error <= part.shape[1] * (1.1 * step).square()).all())
        assert bool((error[:3] <= part.shape[1] * (0.5 * step[:3]).square()).all())
    assert weights.bias is not None


def test_clipping_is_kept_where_it_is_nearer(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(200, 64, generator=generator)
    clipped = (dequantised(quantise_int4(LinearWeights(values))) - values).square().mean()
    monkeypatch.setattr(quantise, "INT4_CLIP_RATIOS", (1.0,))
    plain = (dequantised(quantise_int4(LinearWeights(values))) - values).square().mean()
    assert clipped < 0.98 * plain


def test_an_odd_number_of_inputs_is_refused():
    with pytest.raises(ModelLoadError, match="5 x 33 in 4 bits: expected an even number of inputs"):
        quantise_int4(LinearWeights(torch.ones(5, 33)))


FORMS = [
    (48, 64, 32, 4, False, torch.bfloat16),
    (150, 640, 128, 4, True, torch.float16),
    (331, 258, 64, 4, True, torch.float32),
    (50, 90, 90, 4, True, torch.float16),
    (100, 333, 32, 8, False, torch.float16),
    (50, 96, 32, 8, True, torch.float32),
    (70, 45, 45, 8, True, torch.bfloat16),
]


@each_isa
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form[:5])))
def test_products_are_those_of_the_integers(isa, form):
    """In every number of rows that has a tile of its own, outliers and zeros among them."""
    rows, columns, group, bits, zeros, scales = form
    weights = bundle(rows, columns, group, bits, zeros=zeros, scales=scales, seed=rows)
    linear = NativeOps(context(2, isa)).linear(weights)
    exact, bias = dequantised(weights), weights.bias
    assert bias is not None
    generator = torch.Generator().manual_seed(3)
    for dtype, tolerance in (
        (torch.float32, 1e-6),
        (torch.bfloat16, 2**-8),
        (torch.float16, 2**-11),
    ):
        x = torch.randn(13, columns, generator=generator)
        x[5] *= 1000.0 if dtype != torch.float16 else 30.0
        x[6] = 0.0
        x = x.to(dtype)
        expected = rounded(x) @ exact.T + bias.double()
        size = rounded(x).abs() @ exact.abs().T + bias.double().abs()
        for count in (0, 1, 2, 3, 4, 5, 13):
            found = linear(x[:count])
            assert found.dtype == dtype
            error = (found.double() - expected[:count]).abs()
            limit = tolerance * expected[:count].abs() + 1e-6 * size[:count]
            assert bool((error <= limit).all()), (count, dtype)


@needs_native
@pytest.mark.parametrize("bits", [4, 8])
def test_instruction_sets_agree_to_the_last_bit(bits):
    weights = bundle(100, 334, 64, bits, zeros=True, scales=torch.bfloat16, seed=4)
    x = torch.randn(9, 334, generator=torch.Generator().manual_seed(5))
    found = [NativeOps(context(1, isa)).linear(weights)(x) for isa in ISAS]
    for other in found[1:]:
        assert torch.equal(other, found[0])


@each_isa
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_no_sum_overflows(isa, scheme):
    """The greatest codes, zero points and inputs, all of one sign."""
    columns, ops = 4096, NativeOps(context(1, isa))
    for code, zero in (
        ((15, 0), (0, 15), (0, 255)) if scheme == "int4" else ((127, -128), (-128, 127))
    ):
        if scheme == "int4":
            values = torch.full((3, columns // 2), code * 17, dtype=torch.uint8)
        else:
            values = torch.full((3, columns), code, dtype=torch.int8)
        grid = torch.ones(3, 1)
        linear = ops.linear(LinearWeights(values, None, scheme, grid, (1, columns), grid * zero))
        x = torch.full((2, columns), 3.0)
        x[1] = -3.0
        expected = (x.sum(1, keepdim=True) * (code - zero)).expand(2, 3)
        torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=0.0)


@needs_native
@pytest.mark.parametrize("bits", [4, 8])
def test_tied_embedding_equals_quantised_head(bits):
    weights = bundle(90, 102, 32, bits, zeros=True, scales=torch.float16, seed=6)
    embedding, head = NativeOps(context(1)).tied_embedding(weights, torch.float32)
    ids = torch.tensor([89, 0, 31, 31])
    torch.testing.assert_close(
        embedding(ids).double(), dequantised(weights)[ids], rtol=1e-6, atol=0.0
    )
    assert head(torch.ones(1, 102)).shape == (1, 90)


@needs_native
def test_forms_that_the_kernels_lack_are_refused():
    """And no others: a loader asks before it reads such weights."""
    ops = NativeOps(context(1))
    for form, taken in (
        (WeightSpec((6, 64)), True),
        (WeightSpec((6, 64), "int8", (1, 64)), True),
        (WeightSpec((6, 64), "int8", (1, 64), has_zeros=True), True),
        (WeightSpec((6, 64), "int4", (1, 32), has_zeros=True), True),
        (WeightSpec((6, 50), "int4", (1, 50)), True),
        (WeightSpec((6, 64), "int4", (1, 16)), False),
        (WeightSpec((6, 64), "int8", (2, 64)), False),
        (WeightSpec((6, 64), "int4", (1, 32), has_column_order=True), False),
        (WeightSpec((6, 64), "e4m3", (1, 64)), False),
        (WeightSpec((6, 64), "e2m1", (1, 32)), False),
    ):
        assert ops.accepts_weights(form) == taken, form
    weights = bundle(6, 64, 16, 4, zeros=True, scales=torch.float32, seed=7)
    with pytest.raises(ModelLoadError, match=r"'int4' with scale_block=\(1, 16\).*multiple of 32"):
        ops.linear(weights)
    for zero in (0.5, -1.0, 256.0, torch.nan):
        weights = bundle(6, 64, 32, 4, zeros=True, scales=torch.float32, seed=7)
        assert weights.zeros is not None
        zeros = weights.zeros.float()
        zeros[1, 1] = zero
        with pytest.raises(ModelLoadError, match="zeros: expected integers from 0 to 255"):
            ops.linear(LinearWeights(weights.values, None, "int4", weights.scales, (1, 32), zeros))


@needs_native
def test_only_packed_form_is_held():
    """4 bits and a scale of 16 for 32 inputs; zero points only where they are not the middle."""
    ops = NativeOps(context(1, "baseline"))
    rows, columns = 64, 256
    for zeros, expected in ((False, rows * columns * 4.5 / 8), (True, rows * columns * 4.75 / 8)):
        weights = bundle(rows, columns, 32, 4, zeros=zeros, scales=torch.bfloat16, seed=8)
        assert ops.make_linear(weights).weights.num_bytes == expected
