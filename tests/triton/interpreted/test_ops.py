"""Every op but attention, interpreted: norms, activations, rotation with the cache write, step
state, sampling, experts, and layers with a state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.gated_delta import DecayParameters
from asyncllm.gpu.ops.routing import TorchRouting
from asyncllm.gpu.ops.triton import expert_pairs
from asyncllm.gpu.ops.triton.op_set import TritonOps
from tests import recurrent_checks
from tests.exact_experts import ROUTINGS, router_weights
from tests.op_sets import TOLERANCE
from tests.slow import slow_but
from tests.triton import checks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPS = TritonOps()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 100, 2560])
def test_norm(width: int, dtype: torch.dtype) -> None:
    checks.check_norm(OPS, width, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [48, 1100])
def test_activations(width: int, dtype: torch.dtype) -> None:
    checks.check_activations(OPS, width, dtype, "cpu")


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("heads", "block_size", "layout", "dtype"),
    [
        ((4, 2, 64), 16, "layers", torch.bfloat16),
        ((16, 8, 128), 16, "layers", torch.float16),
        ((5, 1, 80), 256, "blocks", torch.float16),
        ((7, 1, 96), 48, "heads", torch.float32),
        ((4, 1, 256), 16, "dims", torch.bfloat16),
        ((8, 2, 512), 16, "layers", torch.bfloat16),
        ((5, 1, 320), 16, "blocks", torch.float16),
    ],
)
def test_rope_cache(
    heads: tuple[int, int, int], norm: bool, block_size: int, layout: str, dtype: torch.dtype
) -> None:
    cache = {"block_size": block_size, "layout": layout, "dtype": dtype}
    checks.check_rope_cache(OPS, AttentionShape(*heads, 1.0), "cpu", norm=norm, **cache)


NORMS = [
    {"whole": True, "wide": True},
    {"scaled": True},
    {"whole": True, "wide": True, "scaled": True},
    {"values": True},
]


@pytest.mark.parametrize(
    ("options", "head_dim", "dtype"),
    [
        *((options, 48, dtype) for options in NORMS for dtype in DTYPES),
        ({"values": True}, 512, torch.bfloat16),
    ],
    ids=str,
)
def test_norms_before_a_rotation(options: dict, head_dim: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(6, 2, head_dim, 1.0)
    checks.check_rope_cache(OPS, shape, "cpu", norm=True, dtype=dtype, **options)


@pytest.mark.parametrize("block_size", [16, 256])
def test_step_state(block_size: int) -> None:
    checks.check_step_state(OPS.fill_decode_inputs, "cpu", block_size)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (700, torch.float32),
        (600, torch.bfloat16),
        pytest.param(5003, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sampling(vocab_size: int, dtype: torch.dtype) -> None:
    """In bfloat16 logits tie."""
    logits, *parameters = checks.sampling_rows(20, vocab_size, seed=2)
    checks.check_sampling(OPS.sample, ((logits * 0.5).to(dtype), *parameters), "cpu")


@pytest.mark.parametrize("check", [checks.check_odd_rows, checks.check_company, checks.check_top_k])
def test_rows_of_a_sample(check: Callable[..., None]) -> None:
    check(OPS.sample, "cpu")


CASES = [
    {"tokens": 1},
    {"tokens": 9, "gelu": True},
    {"tokens": 9, "clamped": True, "biased": True},
    {"tokens": 9, "biased": True, "dtype": torch.float16},
    # Tiles of 64 rows, full ones and others.
    {"tokens": 70, "count": 4},
    {"tokens": 20, "count": 5, "clamped": True, "dtype": torch.float32},
    {"tokens": 60, "count": 4, "biased": True, "dtype": torch.float32},
]


@pytest.mark.parametrize("case", slow_but(CASES, *CASES[:3], CASES[-1]), ids=str)
def test_experts(case: dict) -> None:
    checks.check_experts(OPS, "cpu", **case)


@pytest.mark.parametrize("tokens", [5, expert_pairs.ELEMENTS_PER_BLOCK.value // 3 + 50])
def test_pairs_of_one_block_and_of_more(tokens: int) -> None:
    checks.check_sort_pairs(expert_pairs, tokens, 5, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sum(dtype: torch.dtype) -> None:
    checks.check_sum_experts(expert_pairs, dtype, "cpu")


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "groups"])
def test_routing(name: str) -> None:
    checks.check_routing(OPS, ROUTINGS[name], "cpu")


def test_groups_are_left_to_torch() -> None:
    config = ROUTINGS["groups"]
    assert type(OPS.routing(config, router_weights(config))) is TorchRouting


def test_rows_of_nan_are_routed() -> None:
    checks.check_routing_without_numbers(OPS, "correction")
    checks.check_routing_ties(OPS)


@pytest.mark.parametrize(
    ("channels", "width", "dtype"), [(37, 4, torch.float32), (300, 2, torch.bfloat16)]
)
def test_causal_conv(channels: int, width: int, dtype: torch.dtype) -> None:
    recurrent_checks.check_causal_conv(OPS, channels, width, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gated_norm_and_gate(dtype: torch.dtype) -> None:
    for size in (16, 21):
        recurrent_checks.check_gated_norm(OPS, size, dtype, TOLERANCE[dtype])
    recurrent_checks.check_sigmoid_mul(OPS, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 2, 8, 12), torch.float32),
        ((1, 2, 9, 20), torch.bfloat16),
        pytest.param((2, 2, 17, 40), torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["float32", "bfloat16", "odd"],
)
def test_gated_delta(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    recurrent_checks.check_gated_delta(OPS, shape, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_without_tokens_keeps_its_states(dtype: torch.dtype) -> None:
    """Also ahead of a row that starts from no state, and behind all tokens."""
    rows = [(2, 4, 1), (3, 5, 0), (1, 0, 3), (4, 7, 0)]
    config, ops = LinearAttentionConfig((True,), 1, 1, 8, 8, 4), TritonOps()
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4, config.conv_channels, generator=random).to(dtype)
    gates = torch.randn(4, 2, generator=random).to(dtype)
    matrices = torch.randn(6, 1, 8, 8, generator=random)
    held = torch.randn(6, 3, config.conv_channels, generator=random).to(dtype)
    before = [each.clone() for each in (matrices, held)]
    of_step = ops.state_rows(recurrent_checks.state_inputs(rows))
    ops.causal_conv(torch.ones(config.conv_channels, 4).to(dtype))(x, held, of_step)
    ops.gated_delta(config, DecayParameters(*torch.zeros(2, 1)))(x, gates, matrices, of_step)
    for state, old in zip((matrices, held), before, strict=True):
        kept = [bool(torch.equal(state[slot], old[slot])) for slot in range(6)]
        assert kept == [True, False, False, True, True, True]
