"""Packed GGUF blocks: products, gathered rows and memory."""

from __future__ import annotations

import ctypes
import hashlib

import pytest
import torch

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.linear_weights import GGUF_BLOCK_SIZES, LinearWeights, QuantScheme, WeightSpec
from asyncllm.gpu.ops.native_linear import NativeLinear
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.native_weights import BLOCK_TYPE_CODES, pack_new_weights
from tests.linear_weights import rounded
from tests.native_library import ISAS, context, each_isa, needs_native

pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
from tests.gguf_blocks import block_weights, dequantised_blocks

SCHEMES: list[QuantScheme] = list(GGUF_BLOCK_SIZES)


@each_isa
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_and_rows_equal_dequantised_weights(isa, scheme):
    """In every number of rows that has a tile of its own, outliers and zeros among them."""
    rows, columns = 149, 768
    weights = block_weights(scheme, rows, columns, seed=1, bias=True)
    exact, bias = dequantised_blocks(weights), weights.bias
    assert bias is not None
    embedding, linear = NativeOps(context(2, isa)).tied_embedding(weights, torch.float32)
    assert torch.equal(embedding(torch.arange(rows)), exact)
    generator = torch.Generator().manual_seed(3)
    for dtype, tolerance in (
        (torch.float32, 1e-6),
        (torch.bfloat16, 2**-8),
        (torch.float16, 2**-11),
    ):
        x = torch.randn(256, columns, generator=generator)
        # Outputs are beyond float16 otherwise.
        x *= 0.01 if dtype == torch.float16 else 1.0
        x[5] *= 1000.0 if dtype != torch.float16 else 30.0
        x[6] = 0.0
        x = x.to(dtype)
        expected = rounded(x) @ exact.double().T + bias.double()
        size = rounded(x).abs() @ exact.double().abs().T + bias.double().abs()
        whole = linear(x)
        assert whole.dtype == dtype
        limit = tolerance * expected.abs() + 1e-6 * size
        assert bool(((whole.double() - expected).abs() <= limit).all()), dtype
        for count in (0, 1, 2, 3, 4, 5, 6, 16, 48):
            assert torch.equal(linear(x[:count]), whole[:count]), (count, dtype)


@needs_native
@pytest.mark.parametrize("scheme", SCHEMES)
def test_instruction_sets_agree_to_the_last_bit(scheme):
    weights = block_weights(scheme, 100, 1280, seed=4)
    x = torch.randn(9, 1280, generator=torch.Generator().manual_seed(5))
    found = [NativeOps(context(1, isa)).linear(weights)(x) for isa in ISAS]
    for other in found[1:]:
        assert torch.equal(other, found[0])


@each_isa
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("filling", [0x00, 0xFF, 0x7F, 0x80])
def test_no_sum_overflows(isa, scheme, filling):
    """The greatest codes, scales and inputs, all of one sign."""
    columns, weights = 4096, block_weights(scheme, 3, 4096, seed=6)
    elements, size = GGUF_BLOCK_SIZES[scheme]
    blocks = weights.values.view(3, columns // elements, size)
    floats = (
        [208] if scheme == "q6_k" else [0, 2] if scheme[1:] in ("4_1", "5_1", "4_k", "5_k") else [0]
    )
    kept = {place + i: blocks[:, :, place + i].clone() for place in floats for i in (0, 1)}
    blocks.fill_(filling)
    for place, values in kept.items():
        blocks[:, :, place] = values
    exact = dequantised_blocks(weights).double()
    x = torch.full((2, columns), 3.0)
    x[1] = -3.0
    found = NativeOps(context(1, isa)).linear(weights)(x).double()
    limit = 1e-6 * (x.double().abs() @ exact.abs().T) + 1e-6
    assert bool(((found - x.double() @ exact.T).abs() <= limit).all())


@needs_native
def test_broken_or_partial_blocks_are_refused():
    ops = NativeOps(context(1))
    assert set(BLOCK_TYPE_CODES) == set(GGUF_BLOCK_SIZES)
    for scheme in SCHEMES:
        assert ops.accepts_weights(WeightSpec((6, 512), scheme))
        assert not ops.accepts_weights(WeightSpec((6, 512), scheme, has_column_order=True))
        size = GGUF_BLOCK_SIZES[scheme][1]
        with pytest.raises(
            ModelLoadError, match=f"columns of values is {size + 1}, expected a mul"
        ):
            LinearWeights(torch.zeros(6, size + 1, dtype=torch.uint8), scheme=scheme)


@needs_native
def test_nan_scale_makes_nan_output():
    """And no other output."""
    weights = block_weights("q4_k", 70, 512, seed=7)
    weights.values[3, 1] = 0x7E
    found = NativeOps(context(1)).linear(weights)(torch.ones(1, 512))
    assert found[0].isnan().nonzero().flatten().tolist() == [3]


LAYOUTS = {
    "avx512-1": "23f9f72e5ee20f96",
    "avx2-1": "593552113caf8e2c",
    "baseline-1": "8fa4bd34b9f53b6b",
}
"""Digests of the packed bytes of all schemes."""


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in ("avx512", "avx2", "baseline")])
def test_layout_version_matches_packed_bytes(isa):
    """Fails if packed bytes change and ``LAYOUT`` in kernels.h does not: then raise it, and put the
    new digests into LAYOUTS."""
    own, digest = context(1, isa), hashlib.blake2b(digest_size=8)
    for scheme in SCHEMES:
        packed = pack_new_weights(own, block_weights(scheme, 70, 512, seed=9))
        digest.update(ctypes.string_at(packed.address, packed.num_bytes))
    assert {own.weights_layout: digest.hexdigest()}.items() <= LAYOUTS.items()


@needs_native
@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_is_the_file_and_little_more(scheme):
    """Bytes of a block, in the file and packed: the scales of 6 bits take a byte each."""
    weights = block_weights(scheme, 64, 1024, seed=8)
    packed = NativeLinear(context(1), weights).weights.num_bytes
    more = 4 if scheme in ("q4_k", "q5_k") else 0
    elements, size = GGUF_BLOCK_SIZES[scheme]
    assert packed == 64 * (1024 // elements) * (size + more)
