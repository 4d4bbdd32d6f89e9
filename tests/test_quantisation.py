"""int8 weights: error, exact sums, refusals and cost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asyncllm import LLM, EngineConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.model_files import resolve_model
from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.decoder_loading import resolve_quantisers
from asyncllm.gpu.ops import quantise
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.quantise import QUANTISERS, quantise_int8
from asyncllm.gpu.ops.torch_ops import TorchOps
from benchmarks.quality import REFERENCE, logit_error, perplexity, teacher_forced_logits, texts
from tests.native_library import INT8_IN_SPANS, ISAS, context, each_isa, needs_native

PLAIN = ModelConfig.from_directory(resolve_model(None))


def dequantised(weights: LinearWeights) -> torch.Tensor:
    assert weights.scales is not None
    return weights.values.double() * weights.scales.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elements_round_to_nearest_multiple_of_scale(monkeypatch, dtype):
    monkeypatch.setattr(quantise, "MAX_CHUNK_ELEMENTS", 1000)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(40, 300, generator=generator).to(dtype)
    values[3] = 0.0
    values[5, 7] = 100.0
    weights = quantise_int8(LinearWeights(values, torch.ones(40)))
    assert weights.scales is not None
    assert (weights.scheme, weights.scale_block) == ("int8", (1, values.shape[1]))
    assert weights.values.amax(1)[5] == 127
    assert not weights.values[3].any()
    error = (dequantised(weights) - values.double()).abs()
    assert bool((error <= weights.scales.double() * 0.5001).all())
    assert weights.bias is not None


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 41), (300, 640)])
def test_linear_layers_compute_with_the_rounded_weights(isa, dtype, shape):
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    bias = torch.randn(shape[0], generator=generator)
    weights = quantise_int8(LinearWeights(values, bias))
    linear = NativeOps(context(2, isa)).linear(weights)
    x = torch.randn(70, shape[1], generator=generator).to(dtype)
    # Outliers of one row leave the others what they are.
    x[5] *= 1000.0
    x[6] = 0.0
    integers, scales = rounded_inputs(x, isa)
    inputs = (integers * scales.double()).flatten(1)[:, : shape[1]]
    expected = inputs @ dequantised(weights).T + bias.double()
    size = inputs.abs() @ dequantised(weights).abs().T
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    for rows in (0, 1, 2, 3, 17, 70):
        found = linear(x[:rows])
        assert found.dtype == dtype
        error = (found.double() - expected[:rows]).abs()
        bound = tolerance * (1e-2 + expected[:rows].abs()) + 1e-6 * size[:rows]
        assert bool((error <= bound).all())
    # Rounding the inputs leaves them near what they were.
    lost = (inputs - x.double()).norm(dim=1) / x.double().norm(dim=1).clamp(min=1e-9)
    assert lost.max() < (1e-2 if isa in INT8_IN_SPANS else 2e-3)


def rounded_inputs(x: torch.Tensor, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers ``[rows, spans, inputs]`` float64 and scales ``[rows, spans, 1]`` of the kernels."""
    columns = x.shape[1]
    span, limit = 32, 127
    if isa not in INT8_IN_SPANS:
        span, limit = columns, min(32767, (2**31 - 1) // (127 * columns))
    spans = F.pad(x.float(), (0, -columns % span)).unflatten(1, (-1, span))
    largest = spans.abs().amax(2, keepdim=True)
    # A number divided by a tensor would be the number times the reciprocal.
    factors = torch.where(largest > 1e-30, torch.full_like(largest, limit) / largest, 0.0)
    return (spans * factors).round().double(), largest / limit


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in INT8_IN_SPANS])
@pytest.mark.parametrize("columns", [31, 64, 333, 1024])
def test_spans_are_summed_exactly_and_added_in_order(isa, columns):
    """Bit by bit: integers within a span, and the spans' sums in float32 without fusing."""
    generator = torch.Generator().manual_seed(5)
    weights = quantise_int8(LinearWeights(torch.randn(100, columns, generator=generator)))
    # A checkpoint's integers go down to -128.
    weights.values[2, ::3], weights.values[3] = -128, 0
    x = torch.randn(13, columns, generator=generator)
    x[4, columns // 2] = 300.0
    integers, scales = rounded_inputs(x, isa)
    codes = F.pad(weights.values.double(), (0, -columns % 32)).unflatten(1, (-1, 32))
    sums = torch.einsum("rsi,osi->sro", integers, codes).float()
    expected = torch.zeros(13, 100)
    for span, total in enumerate(sums):
        expected += scales[:, span] * 2.0**-21 * total
    assert weights.scales is not None
    expected *= weights.scales.flatten() * 2.0**21
    for rows in range(1, 14):
        assert torch.equal(NativeOps(context(1, isa)).linear(weights)(x[:rows]), expected[:rows])
    assert not expected[:, 3].any()


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in INT8_IN_SPANS])
def test_an_outlier_harms_its_own_span_alone(isa):
    values = torch.randn(40, 96, generator=torch.Generator().manual_seed(6))
    values[:, 32:64] = 0.0
    linear = NativeOps(context(1, isa)).linear(quantise_int8(LinearWeights(values)))
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(7))
    expected = linear(x)
    x[:, 40] = 1e6
    assert torch.equal(linear(x), expected)


@each_isa
def test_a_huge_input_overflows_no_earlier_than_the_output(isa):
    weights = quantise_int8(LinearWeights(torch.full((3, 70), 0.5)))
    x = torch.zeros(2, 70)
    x[0, 69], x[1, 5] = 3e38, 1.0
    found = NativeOps(context(1, isa)).linear(weights)(x)
    torch.testing.assert_close(found, torch.tensor([[1.5e38] * 3, [0.5] * 3]))


@needs_native
def test_instruction_sets_agree_to_the_last_bit():
    """Those that round the inputs alike."""
    generator = torch.Generator().manual_seed(3)
    weights = quantise_int8(LinearWeights(torch.randn(100, 333, generator=generator)))
    x = torch.randn(9, 333, generator=generator)
    found: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for isa in ISAS:
        found[isa in INT8_IN_SPANS].append(NativeOps(context(1, isa)).linear(weights)(x))
    for alike in found.values():
        for other in alike[1:]:
            assert torch.equal(other, alike[0])


@each_isa
@pytest.mark.parametrize("columns", [1, 515, 16384, 140_001])
def test_no_sum_overflows(isa, columns):
    weights = quantise_int8(LinearWeights(torch.ones(3, columns)))
    x = torch.full((2, columns), 3.0)
    x[1] = -3.0
    expected = torch.tensor([[3.0], [-3.0]]).expand(2, 3) * columns
    found = NativeOps(context(1, isa)).linear(weights)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


@needs_native
def test_tied_embedding_equals_quantised_head():
    generator = torch.Generator().manual_seed(4)
    weights = quantise_int8(LinearWeights(torch.randn(90, 36, generator=generator)))
    embedding, _ = NativeOps(context(1)).tied_embedding(weights, torch.float32)
    ids = torch.tensor([89, 0, 31, 31])
    torch.testing.assert_close(
        embedding(ids).double(), dequantised(weights)[ids], rtol=1e-6, atol=0.0
    )
    for wrong in ([90], [-1]):
        with pytest.raises(RuntimeError, match="gather: a slot, block or position"):
            embedding(torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"gather: ids are \(1,\) of torch.int32"):
        embedding(torch.tensor([1], dtype=torch.int32))


@pytest.mark.parametrize("name", QUANTISERS)
def test_where_there_are_no_such_layers_it_is_refused(name):
    config, none = EngineConfig(quantization=name), EngineConfig()
    for device, words in (("cuda:0", "device cuda:0"), ("cpu", "op set 'torch'")):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            resolve_quantisers(config, PLAIN, torch.device(device), TorchOps())
        assert caught.value.param == "quantization"
        assert "expected None, or a CPU with native ops" in str(caught.value)
        assert resolve_quantisers(none, PLAIN, torch.device(device), TorchOps()) is None
    with (
        pytest.raises(InvalidRequestError, match=f"quantization='{name}'"),
        LLM(device="cpu", attention_backend="torch", quantization=name),
    ):
        pass


@pytest.mark.slow
@needs_native
def test_the_packaged_model_hardly_changes():
    found = texts(3000)
    expected = teacher_forced_logits(found, **REFERENCE)
    plain = perplexity(found, expected)
    for quantization, bounds, least in (
        (None, (0.0, 1e-4), 0.99),
        ("int8", (1e-4, 0.03), 0.97),
        ("int4", (0.03, 0.2), 0.93),
    ):
        logits = teacher_forced_logits(
            found, dtype="float32", attention_backend="native", quantization=quantization
        )
        error, same = logit_error(expected, logits)
        print(f"quantization={quantization}: {error}, {same}, {perplexity(found, logits) / plain}")
        assert bounds[0] <= error < bounds[1]
        assert same > least
        assert abs(perplexity(found, logits) / plain - 1.0) < 0.02
