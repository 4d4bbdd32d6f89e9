"""Launches that are recorded: how many a step has and what it sends, where kernels would be
compiled again, and operands that a kernel would misread."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from asyncllm.gpu.batch.sampling_inputs import RowsToSample
from asyncllm.gpu.batch.step_buffer import StepBuffer
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.graph.cuda_graphs import GraphKey
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton import (
    activation,
    decode_attention,
    norm,
    rope_cache,
    sampling,
)
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.tuning import decode_tiles
from asyncllm.sampling_params import SamplingParams
from tests.driver import Driver
from tests.static_runner import LateStream, replay_of, steps_of
from tests.step_inputs import draw_scalars, planned
from tests.triton.launches import Launch, recording
from tests.triton.paged import attend_decodes
from tests.triton.small_steps import ROWS, make_step

GREEDY = SamplingParams(temperature=0.0, seed=0)
SILENT = {
    "aten::view", "aten::slice", "aten::select", "aten::split", "aten::split_with_sizes",
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::t",
    "aten::transpose", "aten::unbind", "aten::_unsafe_view", "aten::detach", "aten::alias",
    "aten::as_strided", "aten::unsqueeze", "aten::expand",
}  # fmt: skip
"""Ops of torch that launch nothing."""


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name not in SILENT:
            self.ops[name] += 1
        return func(*args, **(kwargs or {}))


def nodes(num_layers: int, rows: int) -> Counter[str]:
    fields = {"num_layers": num_layers, "sliding_layers": ()}
    replay = replay_of(make_step(4096, (), torch.bfloat16, **fields))
    with recording() as launches, Counting() as counting, torch.inference_mode():
        replay.run_padded_rows(GraphKey(rows))
    return counting.ops + Counter(launch.kernel.fn.__name__ for launch in launches)


@pytest.mark.parametrize(("rows", "merges"), [(1, 1), (ROWS, 0)])
def test_nodes_of_a_decode_step(rows, merges):
    """A merge where a sequence is shared among programs; around the layers step state with table
    changes, embedding, first norm, the output head, and two for sampling."""
    two = nodes(2, rows)
    layer = nodes(3, rows) - two
    kernels = {"rope_cache": 1, "decode": 1, "merge": merges, "norm": 2, "gated_mul": 1}
    assert layer == +Counter(
        {"aten::linear": 4} | {f"{name}_kernel": count for name, count in kernels.items()}
    )
    around = ["decode_inputs_kernel", "aten::embedding", "norm_kernel", "aten::linear"]
    assert two - layer - layer == Counter(
        [*around, "chunk_statistics_kernel", "sample_tokens_kernel"]
    )


def sent_in_a_mixed_step(max_len: int) -> list[int]:
    """Bytes of each copy for three decode rows, and prompts of 9 and 21 tokens."""
    stream, sent = LateStream(), list[int]()
    runner = make_step(max_len, (), torch.bfloat16, stream=stream)
    copy_from, from_numpy = StepBuffer.copy_from, torch.from_numpy

    def copied(self: StepBuffer, source: StepBuffer, last: str) -> None:
        sent.append(self.end_offsets[last])
        copy_from(self, source, last)

    def counted(array: Any) -> torch.Tensor:
        sent.append(array.nbytes)
        return from_numpy(array)

    driver = Driver(runner)
    decoding = [driver.add([1, 2, 3] * count, 9, GREEDY) for count in (1, 3, 8)]
    entering = [driver.add([5] * count, 9, GREEDY) for count in (9, 21)]
    with recording(), pytest.MonkeyPatch.context() as patch:
        driver.launch([(seq, 0) for seq in decoding])
        stream.synchronize()
        patch.setattr(StepBuffer, "copy_from", copied)
        patch.setattr(torch, "from_numpy", counted)
        driver.launch([(seq, 0) for seq in decoding + entering])
        stream.synchronize()
    assert sum(sent) == steps_of(runner).memory.buffer.memory.nbytes
    return sent


def test_a_mixed_step_sends_no_block_tables():
    """One copy of all sections, for sequences of any length."""
    short, long = sent_in_a_mixed_step(256), sent_in_a_mixed_step(131_072)
    assert short == long
    assert len(short) == 1


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
def test_attention_of_mixed_steps(shape, width, prefix):
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


def test_rotation_of_queries_alone():
    rope = rope_cache.TritonRope(AttentionShape(3, 1, 18, 1.0), None, 1e-6)
    table = torch.zeros((64, 18), dtype=torch.bfloat16)
    with recording() as launches:
        for tokens in (1, 2, 3, 8, 16):
            q = torch.zeros((tokens, 54), dtype=torch.bfloat16)
            rope(q, (table, torch.arange(tokens)))
    check_one_of_each(launches, {"rope_cache_kernel"})


@pytest.mark.parametrize("vocab_size", [128256, 151936])
def test_sampling(vocab_size):
    """The chunks of these vocabularies are no multiple of four."""
    lines = [torch.zeros(10, dtype=torch.float32) for _ in range(3)]
    top_k = torch.zeros(10, dtype=torch.int32)
    states, last_sampled_tokens = torch.zeros((2, 16), dtype=torch.int64)
    with recording() as launches:
        for rows in range(1, 9):
            logits = torch.zeros((rows, vocab_size), dtype=torch.bfloat16)
            slots = torch.arange(rows)
            drawn = RowsToSample(slots, slots, last_sampled_tokens)
            scalars = draw_scalars(states, lines[0], top_k, *lines[1:])
            sampling.sample(logits, scalars, drawn, torch.empty_like(slots))
    check_one_of_each(launches, {"chunk_statistics_kernel", "sample_tokens_kernel"})


TOKENS = 6
HALF = torch.ones(8)
LINES = torch.arange(TOKENS)


def gaps(*shape: int) -> Tensor:
    """Every other element of a wider tensor."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


def attend(q: Tensor, out: Tensor, cache: Tensor) -> None:
    rows = torch.zeros(TOKENS, dtype=torch.int64), torch.ones(TOKENS, dtype=torch.int32)
    table = torch.zeros((2, 5), dtype=torch.int32)
    attend_decodes(
        decode_attention, q, cache, table, *rows, scale=1.0, out=out, tiles=decode_tiles(90, 16, 4)
    )


def strided(shape: tuple[int, ...], *strides: int) -> Tensor:
    return torch.empty_strided(shape, strides, device="meta")


Q, CACHE = torch.zeros(TOKENS, 4, 16), torch.zeros(2, 4, 16, 2, 16)
SPREAD = strided((2, 4, 16, 2, 16), 1, 2, 8, 128, 2**27)


@pytest.mark.parametrize(
    ("q", "out", "cache", "words"),
    [
        (gaps(TOKENS, 4, 16), Q, CACHE, "q has strides .*: expected contiguous heads"),
        (Q, gaps(TOKENS, 4, 16), CACHE, "out has strides .*: expected contiguous heads"),
        (strided((TOKENS, 4, 16), 16, 2**29, 1), Q, CACHE, "q has heads 536870912 elements apart"),
        (Q, Q, SPREAD, "elements of a head 134217728 apart"),
    ],
)
def test_heads_with_gaps_and_offsets_beyond_32_bits(q, out, cache, words):
    """Kernels count heads of a row, and elements of a head, in 32 bits; all else in 64."""
    with pytest.raises(ValueError, match=words):
        attend(q, out, cache)


def test_a_cache_beyond_32_bits():
    rope = rope_cache.TritonRopeAndCache(AttentionShape(4, 2, 16, 1.0), None, None, 1e-6)
    with pytest.raises(ValueError, match="elements of a head 134217728 apart"):
        rope(torch.zeros(TOKENS, 128), (torch.zeros(9, 16), LINES), SPREAD, LINES)


def test_shares_of_more_rows_than_lines_of_the_table():
    """Several rows may go on from one line; each of them has its share."""
    rows = torch.zeros(9, dtype=torch.int64), torch.ones(9, dtype=torch.int32)
    table = torch.zeros((2, 5), dtype=torch.int32)
    with recording() as launches:
        attend_decodes(
            decode_attention, torch.zeros(9, 4, 16), torch.zeros(2, 4, 16, 2, 16), table, *rows,
            scale=1.0, extra_splits=2, tiles=decode_tiles(90, 16, 4),
        )  # fmt: skip
    assert [each.arguments["MAX_ROWS"] for each in launches] == [16, 16]


def sample(logits: Tensor) -> None:
    zeros = torch.zeros(TOKENS + 1)
    parameters = draw_scalars(LINES, zeros, zeros.int(), zeros, zeros)
    sampling.sample(logits, parameters, RowsToSample(LINES, LINES, LINES.clone()), LINES.clone())


def rotate(qkv: Tensor) -> None:
    rope = rope_cache.TritonRopeAndCache(AttentionShape(2, 1, 2, 1.0), None, None, 1e-6)
    rope(qkv, (torch.zeros(9, 2), LINES), torch.zeros(2, 1, 16, 1, 2), LINES)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (norm.TritonRMSNorm(HALF, 1e-6), "x"),
        (
            lambda x: norm.TritonRMSNorm(HALF, 1e-6).add_and_norm(torch.zeros(TOKENS, 8), x),
            "residual",
        ),
        (activation.silu_mul, "gate"),
        (lambda x: activation.gelu_mul(torch.zeros(TOKENS, 8), x), "up"),
        (lambda x: activation.sigmoid_mul(x, x), "gate"),
        (lambda x: activation.softcap(x, 3.0), "x"),
        (norm.TritonGatedNorm(HALF[:4], 1e-6), "x"),
        (sample, "logits"),
        (rotate, "qkv"),
    ],
)
def test_rows_with_gaps(run, name):
    x = gaps(TOKENS, 8)
    with pytest.raises(ValueError, match=f"{name} has strides .16, 2.: expected contiguous rows"):
        run(*(x, x) if isinstance(run, norm.TritonGatedNorm) else (x,))


def test_rows_of_another_length_than_the_weight():
    with pytest.raises(ValueError, match="rows of 12 elements: expected 8"):
        norm.TritonRMSNorm(HALF, 1e-6)(torch.zeros(TOKENS, 12))
