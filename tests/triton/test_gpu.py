"""The checks of the kernels on a GPU: the interpreter's cases, and what is too large for it.

They skip where there is none. None of them has been run so far.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.gumbel import gumbel_sample
from asyncllm.gpu.ops.triton import (
    activation,
    decode_attention,
    decode_inputs,
    expert_pairs,
    experts,
    norm,
    prefill_attention,
    rope_cache,
    sampling,
)
from asyncllm.gpu.ops.triton.op_set import TritonOps
from tests import recurrent_checks
from tests.exact_experts import ROUTINGS
from tests.gpu_turns import beside_others  # noqa: F401 - pytest finds a fixture by its name
from tests.triton import checks
from tests.triton.cases import (
    DECODE,
    LONG_DECODE,
    LONG_PREFILL,
    PREFILL,
    WIDE_DECODE,
    WIDE_PREFILL,
)
from tests.triton.decoder_steps import run_steps
from tests.triton.paged import AttentionCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("beside_others"),
]

DTYPES = [torch.bfloat16, torch.float16]


def grid(kind: str) -> list[AttentionCase]:
    """Every group with every head size; the rest of the parameters takes turns."""
    pages = itertools.cycle((16, 256))
    dtypes = itertools.cycle(DTYPES * 2 + [torch.float16])
    cases = []
    for group, dim in itertools.product((1, 4, 5, 7, 8, 16), (64, 80, 128, 256, 512)):
        decode = kind == "decode"
        cases.append(
            AttentionCase(
                f"group{group}-head{dim}",
                group,
                dim,
                (1, 0, 255, 1025, 2000) if decode else (1, 700, 1300, 90),
                () if decode else (1, 700, 64, 17),
                block_size=next(pages),
                dtype=next(dtypes),
                splits=5 if decode else 1,
            )
        )
    return cases


@pytest.fixture(scope="module")
def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@pytest.mark.parametrize("case", DECODE + WIDE_DECODE + grid("decode") + LONG_DECODE, ids=str)
def test_decode(case: AttentionCase, capability: int) -> None:
    checks.check_decode(decode_attention, case, "cuda", capability)


@pytest.mark.parametrize("case", PREFILL + WIDE_PREFILL + grid("prefill") + LONG_PREFILL, ids=str)
def test_prefill(case: AttentionCase, capability: int) -> None:
    checks.check_prefill(prefill_attention, case, "cuda", capability)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 100, 1024, 2560, 4096, 16384])
def test_norm(width: int, dtype: torch.dtype) -> None:
    checks.check_norm(norm, width, dtype, "cuda")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("width", [48, 1100, 28672])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    checks.check_silu_mul(activation, width, dtype, "cuda")


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("layout", ["layers", "blocks", "heads", "dims"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(16, 8, 128), (5, 1, 80), (32, 8, 64), (16, 2, 512)]
)
def test_rope_cache(heads: int, kv_heads: int, dim: int, layout: str, with_norm: bool) -> None:
    shape = AttentionShape(heads, kv_heads, dim, 1.0)
    checks.check_rope_cache(rope_cache, shape, "cuda", norm=with_norm, layout=layout)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("clamped", [False, True], ids=["SwiGLU", "clamped"])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_experts(tokens: int, clamped: bool, dtype: torch.dtype) -> None:
    """Nine tokens have small tiles, seventy large ones."""
    options = {"tokens": tokens, "clamped": clamped, "biased": clamped, "count": 4}
    checks.check_experts(experts, "cuda", dtype=dtype, **options)


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "groups"])
def test_routing(name: str) -> None:
    checks.check_routing(TritonOps(), ROUTINGS[name], "cuda")


@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 4), (700, 128), (8192, 512)])
def test_pairs_of_experts(tokens: int, num_experts: int) -> None:
    checks.check_sort_pairs(expert_pairs, tokens, num_experts, "cuda")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_sum_of_experts(dtype: torch.dtype) -> None:
    checks.check_sum_experts(expert_pairs, dtype, "cuda")


@pytest.mark.parametrize("block_size", [16, 256])
def test_step_state(block_size: int) -> None:
    checks.check_step_state(decode_inputs.decode_inputs, "cuda", block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [700, 5003, 151_936])
def test_sampling(vocab_size: int, dtype: torch.dtype) -> None:
    logits, *parameters = checks.sampling_rows(64, vocab_size)
    checks.check_sampling(sampling.sample, (logits.to(dtype), *parameters), "cuda")


def test_sampling_odd_rows() -> None:
    checks.check_odd_rows(sampling.sample, "cuda")


def test_top_k() -> None:
    checks.check_top_k(sampling.sample, "cuda")


def test_sampling_company() -> None:
    checks.check_company(sampling.sample, "cuda")


def test_the_plain_function_is_the_same_on_the_gpu() -> None:
    arguments = [value.cuda() for value in checks.sampling_rows(64, 32_000, seed=3)]
    same = checks.draw(sampling.sample, arguments) == gumbel_sample(*arguments)
    assert same.float().mean() > 0.98


def test_the_decoder_on_both_backends() -> None:
    device = torch.device("cuda")
    expected = run_steps("torch", torch.float32, device)
    for logits, wanted in zip(run_steps("triton", torch.float32, device), expected, strict=True):
        assert torch.allclose(logits, wanted, rtol=1e-3, atol=1e-3)


def test_decode_runs_in_a_cuda_graph(capability: int) -> None:
    checks.check_decode_replays(decode_attention, capability)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 128, 128), (3, 3, 17, 70)], ids=["qwen", "odd"])
def test_gated_delta(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    recurrent_checks.check_gated_delta(TritonOps(), shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolution_norm_and_gate(dtype: torch.dtype) -> None:
    ops, tolerance = TritonOps(), 2e-5 if dtype == torch.float32 else 4e-2
    recurrent_checks.check_causal_conv(ops, 300, 4, dtype, tolerance, "cuda")
    recurrent_checks.check_gated_norm(ops, 128, dtype, tolerance, "cuda")
    recurrent_checks.check_sigmoid_mul(ops, dtype, tolerance, "cuda")
