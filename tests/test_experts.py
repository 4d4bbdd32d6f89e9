"""Routing and experts of every op set against plain formulas in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.experts import ExpertsWeights, split_experts
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.quantise import quantise_int4, quantise_int8
from asyncllm.gpu.ops.routing import RouterWeights
from asyncllm.gpu.ops.torch_ops import TorchOps
from tests.exact_experts import ROUTINGS, exact_experts, randn, router_weights
from tests.native_library import ISAS
from tests.op_sets import BACKENDS, TOLERANCE, make, quantised
from tests.triton.checks import check_experts, check_routing_ties, check_routing_without_numbers

NATIVE = [f"native-{isa}" for isa in ISAS]
SILU, CLAMPED = ActivationConfig(), ActivationConfig(limit=1.5, alpha=1.7)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return make(request.param)


def routed(config: RoutingConfig, weights: RouterWeights, x: list[float]) -> dict[int, float]:
    """The weight of each expert of one token, by the definition."""
    rows = weights.linear.values.tolist()
    biases = [0.0] * len(rows) if weights.linear.bias is None else weights.linear.bias.tolist()
    logits = [
        sum(a * b for a, b in zip(row, x, strict=True)) + bias
        for row, bias in zip(rows, biases, strict=True)
    ]
    if config.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        scores = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
    extra = [0.0] * len(rows) if weights.correction is None else weights.correction.tolist()
    choice = [score + more for score, more in zip(scores, extra, strict=True)]
    size = config.num_experts // config.num_groups
    groups = [choice[at : at + size] for at in range(0, len(choice), size)]
    best = sorted(range(len(groups)), key=lambda group: -sum(sorted(groups[group])[-2:]))
    allowed = [i for i in range(len(choice)) if i // size in best[: config.top_groups]]
    if config.num_groups == 1:
        allowed = list(range(len(choice)))
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: config.top_k]
    total = sum(scores[expert] for expert in chosen) if config.renormalise else 1.0
    own = [1.0] * len(rows) if weights.expert_scale is None else weights.expert_scale.tolist()
    return {expert: scores[expert] / total * config.scale * own[expert] for expert in chosen}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(ops, name):
    config = ROUTINGS[name]
    weights, x = router_weights(config), randn(19, 40, seed=4)
    ids, found = ops.routing(config, weights)(x)
    assert (ids.dtype, found.dtype) == (torch.int32, torch.float32)
    assert ids.shape == found.shape == (19, config.top_k)
    for row in range(19):
        expected = routed(config, weights, x[row].tolist())
        assert sorted(ids[row].tolist()) == sorted(expected)
        for expert, weight in zip(ids[row].tolist(), found[row].tolist(), strict=True):
            assert weight == pytest.approx(expected[expert], rel=1e-5)
    assert ops.routing(config, weights)(x[:0])[0].shape == (0, config.top_k)


def test_a_router_in_float32_reads_hidden_states_of_any_dtype(ops):
    """The logits are not rounded on the way."""
    config, x = ROUTINGS["groups"], randn(7, 40, seed=4).bfloat16()
    weights = router_weights(config)
    ids, found = ops.routing(config, weights)(x)
    wide_ids, expected = ops.routing(config, weights)(x.float())
    assert torch.equal(ids, wide_ids)
    assert torch.equal(found, expected)


def test_rows_of_nan_are_routed(ops):
    check_routing_without_numbers(ops, "groups")


@pytest.mark.parametrize("backend", NATIVE)
def test_native_routing_takes_the_first_of_equal_scores(backend):
    check_routing_ties(make(backend))


COUNT, WIDTH, INNER = 5, 40, 24


def experts_weights(
    dtype: torch.dtype = torch.float32,
    biased: bool = False,
    width: int = WIDTH,
    inner: int = INNER,
    count: int = COUNT,
) -> ExpertsWeights:
    def layer(rows: int, columns: int, seed: int) -> LinearWeights:
        values = randn(count * rows, columns, seed=seed) * columns**-0.5
        bias = randn(count * rows, seed=seed + 1).to(dtype) if biased else None
        return LinearWeights(values.to(dtype), bias)

    return ExpertsWeights(count, layer(2 * inner, width, 10), layer(width, inner, 20))


def case(rows: int, dtype: torch.dtype, top_k: int = 2, width: int = WIDTH, count: int = COUNT):
    x = randn(rows, width, seed=5, dtype=dtype)
    ids = randn(rows, count, seed=6).topk(top_k).indices.int()
    return x, ids, randn(rows, top_k, seed=7).softmax(-1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"clamped": True}, {"gelu": True}], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_experts(ops, dtype, options, biased):
    for tokens in (0, 1, 2, 7, 61):
        check_experts(ops, "cpu", tokens=tokens, dtype=dtype, biased=biased, **options)


def test_op_set_counts_bytes_per_token(ops):
    weights = experts_weights()
    expected = (weights.gate_up.values.nbytes + weights.down.values.nbytes) * 2 // COUNT
    ops.experts(weights, SILU, 2)
    assert ops.linear_bytes == expected


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("config", [SILU, CLAMPED])
def test_a_token_is_the_same_bits_in_any_company(backend, form, config):
    """Also where its experts have more rows than one pass over their weights takes."""
    dtype = torch.bfloat16 if form == "int8" else getattr(torch, form)
    # Widths that fill no panel.
    sizes = {"width": 41, "inner": 23}
    weights = experts_weights(dtype, biased=True, **sizes)
    if form == "int8":
        weights = replace(
            weights, gate_up=quantise_int8(weights.gate_up), down=quantise_int8(weights.down)
        )
    experts = make(backend).experts(weights, config, 2)
    x, ids, factors = case(150, dtype, width=41)
    shared, gate = randn(150, 41, seed=8, dtype=dtype), randn(150, 1, seed=9, dtype=dtype)
    together = experts(x, ids, factors, shared, gate)
    assert together.isfinite().all()
    for rows in (slice(0, 1), slice(149, 150), slice(3, 6), slice(20, 91)):
        alone = experts(x[rows], ids[rows], factors[rows], shared[rows], gate[rows])
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("backend", NATIVE[:1])
def test_many_tokens_are_computed_in_passes(backend):
    """Each of which takes 64 MiB at most: here there are two."""
    weights = experts_weights(width=64, inner=1)
    experts = make(backend).experts(weights, SILU, 2)
    x, ids, factors = case(40_000, torch.float32, top_k=4, width=64)
    found = experts(x, ids, factors)
    assert torch.equal(experts(x[-3:], ids[-3:], factors[-3:]), found[-3:])
    expected = exact_experts(weights, SILU, x[::999], ids[::999], factors[::999])
    torch.testing.assert_close(found[::999].double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("convert", [quantise_int8, quantise_int4])
def test_quantised_experts_equal_linear_layers(backend, convert):
    """Of the same codes; each token of many has its own expert's."""
    ops, plain = make(backend), experts_weights()
    weights = replace(plain, gate_up=convert(plain.gate_up), down=convert(plain.down))
    x, ids, factors = case(9, torch.float32)
    found = ops.experts(weights, SILU, 2)(x, ids, factors)
    layers = [
        [ops.linear(part) for part in split_experts(layer, COUNT)]
        for layer in (weights.gate_up, weights.down)
    ]
    for row in range(len(x)):
        expected = torch.zeros(WIDTH)
        for expert, factor in zip(ids[row].tolist(), factors[row], strict=True):
            gate_up, down = (layer[expert] for layer in layers)
            expected += factor * down(ops.silu_mul(gate_up(x[row : row + 1])))[0]
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", ["int4", "e2m1"])
def test_unsupported_expert_schemes_are_refused(ops, scheme):
    layer = LinearWeights(**quantised(scheme, COUNT * 2 * INNER, WIDTH, (1, 8)))
    weights = replace(experts_weights(), gate_up=layer)
    with pytest.raises(ModelLoadError, match=f"'{scheme}'"):
        ops.experts(weights, SILU, 2)


@pytest.mark.parametrize("backend", NATIVE)
def test_native_experts_refuse_another_scheme_by_themselves(backend):
    """Those of a form that no native type has."""
    ops: Any = make(backend)
    layer = LinearWeights(**quantised("int4", COUNT * 2 * INNER, WIDTH, (1, 8)))
    with pytest.raises(ModelLoadError, match=r"experts of scheme 'int4' with scale_block=\(1, 8\)"):
        ops.make_experts(replace(experts_weights(), gate_up=layer), SILU)


def test_mismatched_experts_are_refused():
    weights = experts_weights()
    with pytest.raises(ModelLoadError, match="have 240 and 200 rows, expected 288 and 240 for 6"):
        replace(weights, num_experts=6)
    with pytest.raises(ModelLoadError, match="240 and 240 rows"):
        replace(weights, down=weights.gate_up)


@pytest.mark.parametrize("backend", NATIVE[:1])
def test_native_experts_check_their_inputs(backend):
    experts = make(backend).experts(experts_weights(), SILU, 2)
    x, ids, factors = case(3, torch.float32)
    for bad in (-1, COUNT, 2**31 - 1):
        wrong = ids.clone()
        wrong[2, 1] = bad
        with pytest.raises(RuntimeError, match="native experts: a slot, block or position"):
            experts(x, wrong, factors)
    for arguments in (
        (x[:, :8], ids, factors),
        (x.bfloat16(), ids, factors),
        (x, ids.long(), factors),
        (x, ids, factors[:2]),
        (x, ids, factors.double()),
        (x, ids.T.contiguous().T, factors),
        (x, ids, factors, x[:2]),
        (x, ids, factors, x, x[:, :1].double()),
        (x, ids, factors, x, x[:, :2]),
    ):
        with pytest.raises(ValueError, match="native"):
            experts(*arguments)
