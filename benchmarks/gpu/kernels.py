"""The kernels stage: every kernel against float64 on the device, case by case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.gumbel import gumbel_sample
from asyncllm.gpu.ops.triton import (
    decode_attention,
    decode_inputs,
    expert_pairs,
    prefill_attention,
    sampling,
)
from asyncllm.gpu.ops.triton.op_set import TritonOps
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.stage import Stage
from tests import recurrent_checks
from tests.exact_experts import ROUTINGS
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

GROUPS = (1, 4, 5, 7, 8, 16)
HEADS = (64, 80, 128, 256, 512)
DTYPES = (torch.bfloat16, torch.float16)
BLOCK_SIZES = (16, 256)
CASE_SECONDS = 8.0
ALL_RIGHT = Goal("at most", 0.0)

Check = Callable[[], object]


@dataclass(slots=True)
class Family:
    """Cases of one kernel, by name."""

    name: str
    cases: dict[str, Check] = field(default_factory=dict)


def attention_cases(kind: str) -> list[AttentionCase]:
    """Every group, head size, type and block size with every other. A first quarter has each
    group with each head size; within it, and after it, types and block sizes take turns."""
    turns = list(itertools.product(DTYPES, BLOCK_SIZES))
    cases = []
    for shift in range(len(turns)):
        for number, (group, dim) in enumerate(itertools.product(GROUPS, HEADS)):
            dtype, block_size = turns[(number + number // len(HEADS) + shift) % len(turns)]
            kind_of = str(dtype).removeprefix("torch.")
            decode = kind == "decode"
            cases.append(
                AttentionCase(
                    f"group {group}, head {dim}, block {block_size}, {kind_of}",
                    group,
                    dim,
                    (1, 0, 255, 1025, 2000) if decode else (1, 700, 1300, 90),
                    () if decode else (1, 700, 64, 17),
                    block_size=block_size,
                    dtype=dtype,
                    splits=(5, 1)[shift % 2] if decode else 1,
                )
            )
    return cases


def attention_families(device: str, capability: int) -> Iterable[Family]:
    for kind, module, check, special in (
        ("decode", decode_attention, checks.check_decode, DECODE + WIDE_DECODE + LONG_DECODE),
        ("prefill", prefill_attention, checks.check_prefill, PREFILL + WIDE_PREFILL + LONG_PREFILL),
    ):
        for name, cases in (
            (f"{kind} attention, special cases and up to 32k tokens", special),
            (f"{kind} attention, heads, groups, types and block sizes", attention_cases(kind)),
        ):
            family = Family(name)
            for case in cases:
                family.cases[case.name] = lambda check=check, module=module, case=case: check(
                    module, case, device, capability
                )
            yield family


def sampling_family(device: str) -> Family:
    family = Family("sampler")
    for vocab_size, dtype in itertools.product(
        (700, 5003, 151_936), (torch.float32, torch.bfloat16)
    ):

        def check(vocab_size: int = vocab_size, dtype: torch.dtype = dtype) -> None:
            logits, *parameters = checks.sampling_rows(64, vocab_size)
            checks.check_sampling(sampling.sample, (logits.to(dtype), *parameters), device)

        family.cases[f"{vocab_size} tokens, {dtype}"] = check
    family.cases["odd rows"] = lambda: checks.check_odd_rows(sampling.sample, device)
    family.cases["company"] = lambda: checks.check_company(sampling.sample, device)
    family.cases["the plain function on the device"] = lambda: check_plain_sampling(device)
    return family


def check_plain_sampling(device: str) -> None:
    """The function in torch draws the same noise on the device; logarithms differ there in
    the last bits, which moves a token where two were about to tie."""
    arguments = [value.to(device) for value in checks.sampling_rows(64, 32_000, seed=3)]
    same = checks.draw(sampling.sample, arguments) == gumbel_sample(*arguments)
    assert same.float().mean() > 0.98, f"{int((~same).sum())} of 64 tokens differ"


def small_families(device: str) -> Iterable[Family]:
    steps = Family("step state")
    for block_size in BLOCK_SIZES:
        steps.cases[f"block {block_size}"] = lambda size=block_size: checks.check_step_state(
            decode_inputs.fill_decode_inputs, device, size
        )
    yield steps
    norms, activations = Family("norms"), Family("activation")
    for dtype in (*DTYPES, torch.float32):
        for width in (64, 100, 1024, 2560, 4096, 16_384):
            norms.cases[f"{width}, {dtype}"] = lambda width=width, dtype=dtype: checks.check_norm(
                TritonOps(), width, dtype, device
            )
        for width in (48, 1100, 28_672):
            activations.cases[f"{width}, {dtype}"] = lambda width=width, dtype=dtype: (
                checks.check_activations(TritonOps(), width, dtype, device)
            )
    yield norms
    yield activations
    yield rope_family(device)


def experts_family(device: str) -> Family:
    """Few and many rows of an expert, which have other tiles."""
    family = Family("experts")
    for tokens, clamped, dtype in itertools.product((9, 70), (False, True), DTYPES):
        name = f"{tokens} tokens, {'clamped' if clamped else 'SwiGLU'}, {dtype}"
        family.cases[name] = lambda tokens=tokens, clamped=clamped, dtype=dtype: (
            checks.check_experts(
                TritonOps(), device, tokens=tokens, clamped=clamped, biased=clamped, count=4,
                dtype=dtype,
            )
        )  # fmt: skip
    for tokens, count in ((1, 4), (700, 128), (8192, 512)):
        family.cases[f"{tokens} tokens sorted by {count} experts"] = (
            lambda tokens=tokens, count=count: checks.check_sort_pairs(
                expert_pairs, tokens, count, device
            )
        )
    for name in ("renormalised", "correction", "scaled experts"):
        family.cases[f"routing, {name}"] = lambda name=name: checks.check_routing(
            TritonOps(), ROUTINGS[name], device
        )
    for dtype in DTYPES:
        family.cases[f"sum, {dtype}"] = lambda dtype=dtype: checks.check_sum_experts(
            expert_pairs, dtype, device
        )
    return family


def recurrent_family(device: str) -> Family:
    """Ops of layers with a state of each sequence, whose heads are of Qwen3.5's sizes and of odd
    ones."""
    family, ops = Family("gated delta, convolution and gated norm"), TritonOps()
    for dtype, near in ((torch.float32, 2e-5), (torch.bfloat16, 4e-2)):
        for shape in ((1, 2, 128, 128), (3, 3, 17, 70)):
            family.cases[f"gated delta, heads {shape}, {dtype}"] = partial(
                recurrent_checks.check_gated_delta, ops, shape, dtype, device
            )
        for name, check in (
            ("convolution", partial(recurrent_checks.check_causal_conv, ops, 300, 4)),
            ("gated norm", partial(recurrent_checks.check_gated_norm, ops, 128)),
            ("gate", partial(recurrent_checks.check_sigmoid_mul, ops)),
        ):
            family.cases[f"{name}, {dtype}"] = partial(check, dtype, near, device)
    return family


def rope_family(device: str) -> Family:
    family = Family("rotation and cache write")
    heads = ((16, 8, 128), (5, 1, 80), (32, 8, 64), (16, 2, 512))
    layouts = ("layers", "blocks", "heads", "dims")
    for (q, kv, dim), layout, with_norm, dtype in itertools.product(
        heads, layouts, (False, True), DTYPES
    ):
        shape = AttentionShape(q, kv, dim, 1.0)

        def check(
            shape: AttentionShape = shape,
            layout: str = layout,
            with_norm: bool = with_norm,
            dtype: torch.dtype = dtype,
        ) -> None:
            checks.check_rope_cache(
                TritonOps(), shape, device, norm=with_norm, layout=layout, dtype=dtype
            )

        normed = "norm" if with_norm else "plain"
        family.cases[f"{q}/{kv} heads of {dim}, {layout}, {normed}, {dtype}"] = check
    return family


def whole_family(device: str, capability: int) -> Family:
    family = Family("a whole decoder, and a captured launch")
    family.cases["decoder in float32 against plain torch"] = lambda: check_decoder(device)
    family.cases["replays with other lengths"] = lambda: checks.check_decode_replays(
        decode_attention, capability
    )
    return family


def check_decoder(device: str) -> None:
    there = torch.device(device)
    expected = run_steps("torch", torch.float32, there)
    for found, wanted in zip(run_steps("triton", torch.float32, there), expected, strict=True):
        error = float((found - wanted).abs().max())
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3), f"off by up to {error:.3g}"


def families(device: str, capability: int) -> list[Family]:
    """What everything rests on first; the long grids of cases last."""
    attention = list(attention_families(device, capability))
    special, grids = attention[::2], attention[1::2]
    return [
        *special,
        sampling_family(device),
        whole_family(device, capability),
        *small_families(device),
        experts_family(device),
        recurrent_family(device),
        *grids,
    ]


def run(stage: Stage) -> None:
    """Checks on the current CUDA device. What failed is in the table and in the exit code."""
    major, minor = torch.cuda.get_device_capability()
    stage.report.section("right, of the cases that were run")
    run_families(stage, families("cuda", 10 * major + minor))


def run_families(stage: Stage, wanted: Iterable[Family]) -> None:
    for family in wanted:
        failed = len(stage.failed)
        done = sum(
            stage.attempt(f"{family.name}: {name}", CASE_SECONDS, check)
            for name, check in family.cases.items()
        )
        wrong = len(stage.failed) - failed
        note = f"{done} of {len(family.cases)} cases right"
        ran = done + wrong
        stage.scores.add(
            f"{family.name}, wrong", float(wrong) if ran else None, "", ALL_RIGHT, note
        )
