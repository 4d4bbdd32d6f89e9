"""Kernels are not compiled again for where in a step's memory their arguments begin."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton import rope_cache, sampling
from asyncllm.gpu.ops.triton.attention import TritonAttention
from tests.step_inputs import draw_scalars, planned
from tests.triton.launches import Launch, recording

CPU = torch.device("cpu")
SHAPE = AttentionShape(14, 2, 64, 0.125)
BLOCK_SIZE = 16


def compiled_for(launch: Launch) -> str:
    """What Triton looks a compiled kernel up by."""
    kernel = launch.kernel
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(inspect.signature(kernel.fn), kernel.params, backend)
    _, specialised, _ = bind(**launch.arguments)
    return f"{kernel.fn.__name__} {specialised}"


def mixed_step(decodes: int, counts: list[int], width: int, prefix: int = 0) -> StepInputs:
    """Decode rows, then rows of so many tokens, behind so many others."""
    tokens = np.array([1] * decodes + counts, dtype=np.int64)
    table = np.zeros((len(tokens), width), dtype=np.int32)
    starts = np.full_like(tokens, prefix)
    return planned(table, np.arange(len(tokens)), starts, tokens, BLOCK_SIZE)


def check_one_of_each(launches: list[Launch], names: set[str]) -> None:
    keys = {compiled_for(launch) for launch in launches}
    assert len(keys) == len(names), "\n".join(sorted(keys))
    assert {key.split()[0] for key in keys} == names


@pytest.mark.parametrize("prefix", [0, 4000])
@pytest.mark.parametrize("width", [16, 17])
@pytest.mark.parametrize("shape", [SHAPE, AttentionShape(3, 1, 18, 1.0)], ids=str)
def test_attention_of_mixed_steps(shape: AttentionShape, width: int, prefix: int) -> None:
    """Also where the number of decode rows decides at what address prefill rows begin: a row of
    three heads of 18 has 108 bytes."""
    attention = TritonAttention(shape, torch.bfloat16, CPU, capability=90, num_sms=132)
    heads, size = shape.num_kv_heads, shape.head_dim
    cache = torch.zeros((2, 4, BLOCK_SIZE, heads, size), dtype=torch.bfloat16)
    with recording() as launches:
        for count in range(6):
            for rows in (1, 2, 3, 5):
                inputs = mixed_step(count, [20] * rows, width, prefix)
                q = torch.zeros((inputs.num_tokens, shape.num_heads, size), dtype=torch.bfloat16)
                attention(q, q, q, cache, attention.plan(inputs, None, 0))
    of_prefills = [each for each in launches if each.arguments.get("PREFILL")]
    of_rows = [each for each in launches if not each.arguments.get("PREFILL")]
    merge = {"merge_kernel"} if prefix else set()
    check_one_of_each(of_rows, {"decode_kernel", "prefill_kernel"} | merge)
    check_one_of_each(of_prefills, merge)


def test_rotation_of_queries_alone() -> None:
    rope = rope_cache.TritonRope(AttentionShape(3, 1, 18, 1.0), None, 1e-6)
    table = torch.zeros((64, 18), dtype=torch.bfloat16)
    with recording() as launches:
        for tokens in (1, 2, 3, 8, 16):
            q = torch.zeros((tokens, 54), dtype=torch.bfloat16)
            rope(q, (table, torch.arange(tokens)))
    check_one_of_each(launches, {"rope_cache_kernel"})


@pytest.mark.parametrize("vocab_size", [128256, 151936])
def test_sampling(vocab_size: int) -> None:
    """The chunks of these vocabularies are no multiple of four."""
    lines = [torch.zeros(10, dtype=torch.float32) for _ in range(3)]
    top_k = torch.zeros(10, dtype=torch.int32)
    states, last_sampled_tokens = torch.zeros((2, 16), dtype=torch.int64)
    with recording() as launches:
        for rows in range(1, 9):
            logits = torch.zeros((rows, vocab_size), dtype=torch.bfloat16)
            slots = torch.arange(rows)
            sampling.sample(
                logits, draw_scalars(states, lines[0], top_k, *lines[1:]), slots, slots,
                last_sampled_tokens, torch.empty_like(slots),
            )  # fmt: skip
    check_one_of_each(launches, {"chunk_kernel", "choose_kernel"})
