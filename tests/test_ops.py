"""Every op of every op set against plain formulas in float64."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.batch.sampling_inputs import (
    LOGITS_PROCESSING_STAGES,
    LogitsTables,
    RowsToSample,
    SamplingRows,
    SamplingStages,
)
from asyncllm.gpu.batch.sampling_table import LOGITS_PROCESSING_PARAMS
from asyncllm.gpu.models.attention_kinds import attention_kinds
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops import onednn_ops
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.gumbel import chunk_exponential_noise, gumbel_keys, vocab_exponential_noise
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.onednn_ops import (
    MAX_TORCH_LINEAR_MULTIPLY_ADDS,
    OneDNNOps,
    RowBucketedLinear,
    TorchOrPackedLinear,
    bucket_size,
    onednn_works,
)
from asyncllm.gpu.ops.registry import make_ops
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchLinear, TorchOps
from asyncllm.gpu.weights import dummy_weights
from tests import recurrent_checks
from tests.dummy_runner import MODEL
from tests.op_sets import BACKENDS, TOLERANCE, make, quantised
from tests.step_inputs import draw_scalars
from tests.triton import checks

CPU = torch.device("cpu")


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return make(request.param)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(48, 40), (1000, 640)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(ops, dtype, shape, biased):
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if biased else None
    shift = 0.0 if bias is None else bias.double()
    tolerance = TOLERANCE[dtype]
    own = ops.linear(LinearWeights(weight, bias))
    embedding, head = ops.tied_embedding(LinearWeights(weight), dtype)
    for linear, extra in ((own, shift), (head, 0.0)):
        for rows in (0, 1, 3, 17, 70):
            x = torch.randn(rows, shape[1], generator=generator).to(dtype)
            found = linear(x)
            assert found.dtype == dtype
            expected = x.double() @ weight.double().T + extra
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    ids = torch.tensor([shape[0] - 1, 0, 17, 17, 33])
    assert torch.equal(embedding(ids), weight[ids])
    assert torch.equal(ops.embedding(weight)(ids), weight[ids])
    scaled = (weight[ids].float() * 1.625).to(dtype)
    tied, _ = ops.tied_embedding(LinearWeights(weight), dtype, 1.625)
    for found in (tied(ids), ops.embedding(weight, 1.625)(ids)):
        assert torch.equal(found, scaled)
    assert torch.equal(embedding(ids), weight[ids])
    assert (embedding.dtype, embedding.device, embedding.shape) == (dtype, CPU, shape)


def test_row_buckets_are_few_and_near():
    sizes = [bucket_size(count) for count in range(8193)]
    assert sizes[:17] == list(range(17))
    assert len(set(sizes)) == 137
    for count, size in enumerate(sizes[1:], 1):
        assert count <= size == bucket_size(size)
        assert size < count * (1.0625 if count > 128 else 1.125)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shape_caching_ops_see_only_buckets(dtype, monkeypatch):
    """oneDNN keeps every shape that it has met, so no linear layer that calls it may see a
    number of rows as it comes."""
    seen: set[int] = set()

    class Packed(TorchLinear):
        def __init__(self, weights, *, pack_weight=True):
            super().__init__(weights)

        def __call__(self, x):
            seen.add(x.shape[0])
            return super().__call__(x)

    for name in ("PackedLinear", "TorchLinear"):
        monkeypatch.setattr(onednn_ops, name, Packed)
    monkeypatch.setattr(onednn_ops, "onednn_works", lambda dtype: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    ops = OneDNNOps()
    small, large = torch.randn(64, 32).to(dtype), torch.randn(640, 640).to(dtype)
    layers = [
        ops.linear(LinearWeights(small)),
        ops.linear(LinearWeights(large, small.new_zeros(640))),
    ]
    layers += [ops.linear(LinearWeights(small, is_tied=True))]
    layers.append(ops.linear(LinearWeights(large, is_tied=True)))
    generator = torch.Generator().manual_seed(4)
    for layer in layers:
        weight = layer.weight if isinstance(layer, TorchOrPackedLinear) else layer.linear.weight
        x = torch.randn(300, weight.shape[1], generator=generator).to(dtype)
        expected = F.linear(x, weight)
        for rows in range(17, 300, 40):
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(
                layer(x[:rows]), expected[:rows], rtol=tolerance, atol=tolerance
            )
    assert seen == {bucket_size(rows) for rows in seen}
    assert max(seen) > 256


@pytest.mark.skipif(not onednn_works(), reason="this torch has no packed linear layers")
def test_only_tiny_weights_are_kept_in_two_layouts(monkeypatch):
    ops = OneDNNOps()
    attention = TorchAttention(AttentionShape(2, 1, 8, 1.0), torch.float32)
    assert isinstance(make_ops(CPU, attention), OneDNNOps)
    small, large = (
        torch.zeros(10, MAX_TORCH_LINEAR_MULTIPLY_ADDS // 10),
        torch.zeros(11, MAX_TORCH_LINEAR_MULTIPLY_ADDS // 10),
    )
    for capability, kind in (("AVX512", TorchOrPackedLinear), ("AVX2", TorchLinear)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)  # noqa: B023
        assert type(ops.linear(LinearWeights(small))) is kind
        assert type(ops.linear(LinearWeights(small, is_tied=True))) is kind
        assert type(ops.linear(LinearWeights(large))) is RowBucketedLinear
    packed = RowBucketedLinear if onednn_works(torch.bfloat16) else TorchLinear
    assert type(ops.linear(LinearWeights(small.bfloat16()))) is packed
    # Its plain values stay for others to read.
    shared = ops.linear(LinearWeights(large, is_tied=True))
    assert isinstance(shared, RowBucketedLinear)
    assert shared.linear.weight is large


QUANTISED = [
    ("int8", 6, 32, (1, 32)),
    ("int4", 6, 32, (1, 8)),
    ("e2m1", 5, 32, (1, 32)),
    ("e4m3", 200, 300, (128, 128)),
]


@pytest.mark.parametrize(("scheme", "rows", "columns", "block"), QUANTISED)
def test_weights_of_unsupported_schemes_are_refused(ops, scheme, rows, columns, block):
    weights = LinearWeights(**quantised(scheme, rows, columns, block))
    assert weights.shape == (rows, columns)
    accepted = "'plain', or 'int8' and 'int4'" if ops.name == "native" else "'plain' only"
    with pytest.raises(ModelLoadError, match=f"'{scheme}'.*'{ops.name}' takes {accepted}"):
        ops.linear(weights)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheme": "int3"}, "scheme is int3, expected plain or int8 or"),
        ({"values": torch.zeros(6, 32)}, "'int4': dtype of values is .*float32.* expected .*uint8"),
        ({"values": torch.zeros(96, dtype=torch.uint8)}, "dimensions of values is 1, expected 2"),
        ({"scale_block": None}, r"scale_block is None, expected \(rows, columns\)"),
        ({"scale_block": (1, 0)}, r"scale_block is \(1, 0\), expected \(rows, columns\)"),
        ({"scales": None}, r"scales is None, expected \(6, 4\)"),
        ({"scales": torch.ones(6, 3)}, r"scales.*\(6, 3\).*\(6, 4\)"),
        ({"zeros": torch.ones(4, 6)}, r"zeros.*\(4, 6\).*\(6, 4\)"),
        ({"column_order": torch.arange(16)}, r"column_order.*\(16,\).*\(32,\)"),
        ({"bias": torch.zeros(32)}, r"bias.*\(32,\).*\(6,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bundles_that_contradict_themselves(fields, words):
    LinearWeights(**quantised("int4", 6, 32, (1, 8)))
    with pytest.raises(ModelLoadError, match=words):
        LinearWeights(**quantised("int4", 6, 32, (1, 8)) | fields)


def test_plain_weights_have_a_bias_and_nothing_else():
    fields = quantised("int8", 6, 32, (1, 32))
    for name in ("scales", "zeros", "column_order", "scale_block"):
        with pytest.raises(ModelLoadError, match=f"'plain'.*{name} .*expected None"):
            LinearWeights(torch.zeros(6, 32), **{name: fields[name]})
    with pytest.raises(ModelLoadError, match=r"bias .*\(5,\), expected \(6,\)"):
        LinearWeights(torch.zeros(6, 32), torch.zeros(5))
    with pytest.raises(ModelLoadError, match=r"'plain'.*int8.*bfloat16"):
        LinearWeights(torch.zeros(6, 32, dtype=torch.int8))


@pytest.mark.skipif(not onednn_works(), reason="this torch has no packed linear layers")
def test_a_decoder_holds_no_second_copy_while_it_is_built():
    sizes = {"vocab_size": 1024, "hidden_size": 640, "intermediate_size": 1024, "head_dim": 64}
    model = replace(MODEL, **sizes, num_layers=3, num_heads=10, num_kv_heads=10)
    dtype = torch.float32
    plain: list[weakref.ref[torch.Tensor]] = []

    def watched():
        for name, tensor in dummy_weights(model, dtype, CPU):
            assert sum(ref() is not None for ref in plain) <= 1
            if tensor.dim() > 1 and not name.startswith("embed"):
                plain.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    attention = {kind: TorchAttention(kind.shape, dtype) for kind in attention_kinds(model)}
    decoder = build_decoder(model, OneDNNOps(), attention, watched())
    assert len(plain) == 4 * 3
    assert all(ref() is None for ref in plain)
    assert decoder.embedding.shape == (1024, 640)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [96, 51])
def test_norms(ops, dtype, width):
    checks.check_norm(ops, width, dtype, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scales", [(1.0,), (0.25,), (0.5, 0.3)], ids=str)
def test_a_sum_without_a_norm(ops, dtype, scales):
    x, residual = torch.randn(2, 5, 36, generator=torch.Generator().manual_seed(2)).to(dtype)
    total = residual + x * scales[0]
    place = ops.residual_add(*scales)
    assert place(x) is x
    kept = residual.clone()
    summed, added = place.add_and_norm(x, kept)
    assert torch.equal(summed, total * scales[1] if len(scales) > 1 else total)
    assert summed is added is kept


NORMS = [
    {"norm": False},
    *({"norm": True, "whole": whole, "wide": wide} for whole in (0, 1) for wide in (0, 1)),
    {"norm": True, "wide": True, "values": True},
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norms", NORMS, ids=str)
@pytest.mark.parametrize("dim", [8, 48])
@pytest.mark.parametrize("scaled", [False, True], ids=["one-table", "scaled-queries"])
def test_rope_and_cache(ops, dtype, norms, dim, scaled):
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=dim, scale=1.0)
    checks.check_rope_cache(ops, shape, "cpu", dtype=dtype, scaled=scaled, **norms)


def test_norms_of_other_shapes_are_refused(ops):
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
    ops.rope_and_cache(shape, torch.ones(32), torch.ones(16), 1e-6)
    one = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
    ops.rope_and_cache(one, torch.ones(8), torch.ones(8), 1e-6)
    for q_norm, k_norm in (
        (torch.ones(16), torch.ones(16)),
        (torch.ones(32), torch.ones(8)),
        (torch.ones(8), torch.ones(8).bfloat16()),
    ):
        with pytest.raises(ValueError, match=r"norms of q and k are .*expected \[8\] or"):
            ops.rope_and_cache(shape, q_norm, k_norm, 1e-6)
    with pytest.raises(ValueError, match=r"norm of heads is \(16,\)"):
        ops.rope(shape, torch.ones(16), 1e-6)
    with pytest.raises(ValueError, match=r"norm of heads is \(16,\)"):
        ops.rope_and_cache(shape, torch.ones(8), torch.ones(8), 1e-6, torch.ones(16))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_activations(ops, dtype):
    checks.check_activations(ops, 35, dtype, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("channels", "width"), [(37, 4), (70, 2)])
def test_causal_conv(ops, dtype, channels, width):
    recurrent_checks.check_causal_conv(ops, channels, width, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 4, 8, 12), (3, 3, 17, 70)], ids=["grouped", "odd"])
def test_gated_delta(ops, dtype, shape):
    recurrent_checks.check_gated_delta(ops, shape, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [16, 21])
def test_gated_norm(ops, dtype, size):
    recurrent_checks.check_gated_norm(ops, size, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sigmoid_mul(ops, dtype):
    recurrent_checks.check_sigmoid_mul(ops, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_winner_of_the_race(ops, dtype):
    vocab_size, rows, kept = 1500, 9, 70
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 4
    logits, lines = logits.to(dtype), torch.arange(rows)
    temperature = torch.tensor([0.0, 0.7, 1.0] * 3)
    top_k = torch.tensor([3, kept, 0] * 3, dtype=torch.int32)
    columns = lines * 7, temperature, top_k, torch.ones(rows), torch.zeros(rows)
    sampling = draw_scalars(*(F.pad(column, (0, 1)) for column in columns))
    found, last = torch.full((rows,), -9), torch.zeros(rows + 1, dtype=torch.int64)
    ops.sample(logits, sampling, RowsToSample(lines, lines * 2, last), found)
    keys = gumbel_keys(lines * 7, lines * 2 + 1)
    scaled = logits.double() / temperature.clamp(min=1e-9).double().unsqueeze(1)
    order = scaled.sort(dim=-1, descending=True, stable=True).indices
    score = scaled - vocab_exponential_noise(keys, vocab_size).double().log()
    noise = chunk_exponential_noise(keys, 6).double().log()
    chunks = F.pad(scaled, (0, 36), value=-torch.inf).view(rows, 6, 256)
    won = (chunks.logsumexp(-1) - noise).argmax(-1)
    for row in range(rows):
        best = order[row, :kept]
        expected = [
            int(order[row, 0]),
            int(best[score[row, best].argmax()]),
            int(won[row] * 256 + score[row, won[row] * 256 :][:256].argmax()),
        ][row % 3]
        assert int(found[row]) == int(last[row]) == expected


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_processed_logits(ops, dtype):
    vocab_size, token = 70, 5
    logits = (torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(6)) * 3).to(dtype)
    tables = LogitsTables(3, vocab_size, CPU)
    tables.allocate(LOGITS_PROCESSING_STAGES)
    tables.bias_ids[1, :2], tables.bias_values[1, :2] = torch.tensor([9, 8]), 2.5
    tables.allowed[1, 0], tables.in_prompt[1, 0] = 0x1F00, 1 << 9 | 1 << 10
    tables.stop_ids[1, 0] = 12
    tables.counts[1, 8] = 3
    lines = torch.zeros(4)
    line = torch.tensor([0, 1, 0, 0])
    values = (
        *(line.int() * count for count in (1, 2, 1)), line * 9, line * 4, lines + 1.5, lines + 0.25,
        lines + 0.5,
    )  # fmt: skip
    rules = dict(zip(LOGITS_PROCESSING_PARAMS, values, strict=True))
    order = torch.tensor([1, -1, 2])
    rows = SamplingRows(order, order * 0 + 6, order * 0 - 1, torch.full((4,), token), rules, tables)
    found = ops.process_logits(
        logits, rows, SamplingStages.TOKEN_CONSTRAINTS | SamplingStages.PENALTIES
    )
    assert found.dtype == torch.float32
    expected = torch.full((vocab_size,), -torch.inf, dtype=torch.float64)
    expected[8:12] = logits[0, 8:12].double()
    expected[[8, 9]] += 2.5
    for seen in (8, 9, 10):
        expected[seen] *= 1 / 1.5 if expected[seen] > 0 else 1.5
    expected[8] -= 3 * 0.25 + 0.5
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=1e-6)
    counted = logits[2, token].double()
    counted = (counted / 1.5 if counted > 0 else counted * 1.5) - 0.75
    assert found[2, token] == pytest.approx(float(counted), rel=1e-6)
    assert tables.counts.sum(1).tolist() == [0, 4, 1, 0]
    assert torch.equal(found[2, token + 1 :], logits[2, token + 1 :].float())
