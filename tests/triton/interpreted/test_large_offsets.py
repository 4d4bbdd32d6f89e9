"""Kernels on tensors of more than 2**31 elements, which the operating system backs with memory
only where they are touched: the results are those on small ones, to the bit."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.batch.sampling_inputs import RowsToSample
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.gated_delta import DecayParameters
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.triton import (
    activation,
    causal_conv,
    decode_attention,
    decode_inputs,
    experts,
    gated_delta,
    norm,
    prefill_attention,
    rope_cache,
    sampling,
    tuning,
)
from asyncllm.gpu.ops.triton.op_set import TritonOps
from tests.recurrent_checks import state_inputs
from tests.step_inputs import captured, draw_scalars
from tests.triton.paged import attend_decodes, attend_prefills

LARGE = 2**31
NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux."""

Place = Callable[[Tensor], Tensor]


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of which only what is touched takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"no room in the address space: {error}")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def apart(x: Tensor) -> Tensor:
    """Its rows, the third of them 2**31 elements behind the first."""
    rows = reserve((len(x), LARGE // 2), x.dtype)[:, : x.shape[1]]
    return rows.copy_(x)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROWS = 4
LINES = torch.arange(ROWS)


def norms(place: Place) -> list[Tensor]:
    layer, residual = norm.TritonRMSNorm(torch.ones(9), 1e-6), place(drawn(ROWS, 9, seed=1))
    x = place(drawn(ROWS, 9))
    return [layer(x), layer.add_and_norm(x, residual)[0], residual]


def activations(place: Place) -> list[Tensor]:
    x, gate = place(drawn(ROWS, 10)), place(drawn(ROWS, 10, seed=1))
    found = [activation.silu_mul(x), activation.gelu_mul(x, gate), activation.sigmoid_mul(x, gate)]
    found.append(norm.TritonGatedNorm(torch.ones(5), 1e-6)(x, gate))
    return [*found, activation.softcap(x, 3.0)]


def rotated(place: Place) -> list[Tensor]:
    rope = rope_cache.TritonRopeAndCache(AttentionShape(2, 1, 4, 1.0), None, None, 1e-6)
    cache, qkv = torch.zeros(2, 1, 16, 1, 4), place(drawn(ROWS, 16))
    parts = rope(qkv, (place(drawn(ROWS, 4, seed=1)), LINES), cache, LINES)
    return [*parts, cache]


def sampled(place: Place) -> list[Tensor]:
    tokens, ones = torch.empty_like(LINES), torch.ones(ROWS)
    top_k = torch.tensor([0, 5, 0, 5], dtype=torch.int32)
    parameters = draw_scalars(LINES, ones, top_k, ones, ones * 0.01)
    logits = place(drawn(ROWS, 300))
    sampling.sample(logits, parameters, RowsToSample(LINES, LINES, LINES.clone()), tokens)
    return [tokens]


SHAPE = LinearAttentionConfig((True,), 1, 1, 4, 4, 3)
STEP = [(0, 3, 1), (1, 2, 3)]


def recurrent(place: Place) -> list[Tensor]:
    x, gates = place(drawn(ROWS, SHAPE.conv_channels)), place(drawn(ROWS, 2, seed=1))
    rows, held = (
        TritonOps().state_rows(state_inputs(STEP)),
        drawn(2, 2, SHAPE.conv_channels, seed=2),
    )
    matrices = drawn(2, 1, 4, 4, seed=3)
    found = [causal_conv.TritonCausalConv(drawn(SHAPE.conv_channels, 3, seed=4))(x, held, rows)]
    delta = gated_delta.TritonGatedDelta(SHAPE, DecayParameters(*drawn(2, 1, seed=5)))
    return [*found, delta(x, gates, matrices, rows), held, matrices]


def routed(place: Place) -> list[Tensor]:
    weights = ExpertsWeights(2, LinearWeights(drawn(20, 6)), LinearWeights(drawn(12, 5, seed=1)))
    layer = experts.TritonExperts(weights, ActivationConfig())
    ids = torch.tensor([[0], [1], [1], [0]], dtype=torch.int32)
    return [layer(place(drawn(ROWS, 6, seed=2)), ids, torch.ones(ROWS, 1))]


def attended(place: Place) -> list[Tensor]:
    """Of rows, and of lines of the block table."""

    def heads(x: Tensor) -> Tensor:
        return place(x).unflatten(1, (2, 16))

    q, cache, found = heads(drawn(ROWS, 32)), drawn(2, 9, 16, 1, 16, seed=1), []
    table = place(torch.arange(ROWS * 2, dtype=torch.int32).view(ROWS, 2) + 1)
    given = q, cache, table, LINES, torch.tensor([3, 20, 17, 32], dtype=torch.int32)
    decodes: list[dict[str, Any]] = [{}, {"splits": 2}, {"extra_splits": 3}]
    for options in decodes:
        out, options["tiles"] = heads(torch.zeros(ROWS, 32)), tuning.decode_tiles(90, 16, 4)
        found.append(attend_decodes(decode_attention, *given, scale=1.0, out=out, **options))
    starts, tiles = torch.arange(ROWS + 1), tuning.prefill_tiles(90, 16, 4)
    for splits in (1, 2):
        options = {"out": heads(torch.zeros(ROWS, 32)), "splits": splits, "tiles": tiles}
        found.append(attend_prefills(prefill_attention, *given, starts, scale=1.0, **options))
    return found


@pytest.mark.parametrize("run", [norms, activations, rotated, sampled, recurrent, routed, attended])
def test_rows_far_apart(run: Callable[[Place], list[Tensor]]) -> None:
    for found, expected in zip(run(apart), run(torch.clone), strict=True):
        assert torch.equal(found, expected)


def at(index: int, *values: Tensor) -> list[Tensor]:
    """Tensors that have ``values`` at an index of their first dimension, and zeros before it."""
    made = [reserve((index + 1, *value.shape), value.dtype) for value in values]
    for tensor, value in zip(made, values, strict=True):
        tensor[index] = value
    return made


def cached(block: int) -> list[Tensor]:
    """Of blocks of 512 elements."""
    shape, pages = AttentionShape(2, 1, 32, 1.0), reserve((2, block + 1, 16, 1, 32), torch.float32)
    pages[:, block] = drawn(2, 16, 1, 32)
    rope, slots = rope_cache.TritonRopeAndCache(shape, None, None, 1e-6), LINES + block * 16
    q = rope(drawn(ROWS, 128, seed=1), (torch.ones(ROWS, 32), LINES), pages, slots)[0]
    table = torch.full((1, 1), block, dtype=torch.int32)
    rows = table, LINES[:1] * 0, torch.tensor([9], dtype=torch.int32)
    tiles = tuning.decode_tiles(90, 32, 4), tuning.prefill_tiles(90, 32, 4)
    found = attend_decodes(decode_attention, q[:1], pages, *rows, scale=1.0, tiles=tiles[0])
    starts = torch.tensor([0, ROWS])
    prefilled = attend_prefills(
        prefill_attention, q, pages, *rows, starts, scale=1.0, tiles=tiles[1]
    )
    return [found, prefilled, pages[:, block]]


def held(slot: int) -> list[Tensor]:
    """States of 16 and 24 elements a slot."""
    rows = TritonOps().state_rows(state_inputs([(slot, 2, 3)]))
    alone = TritonOps().state_rows(state_inputs([(slot, 5, 1)]))
    inputs, matrices = at(slot, drawn(2, SHAPE.conv_channels), drawn(1, 4, 4, seed=1))
    conv = causal_conv.TritonCausalConv(drawn(SHAPE.conv_channels, 3, seed=2))
    delta = gated_delta.TritonGatedDelta(SHAPE, DecayParameters(*drawn(2, 1, seed=3)))
    found: list[Tensor] = []
    for step, tokens in ((rows, 3), (alone, 1)):
        x = conv(drawn(tokens, SHAPE.conv_channels, seed=4), inputs, step)
        found += [x, delta(x, drawn(tokens, 2, seed=5), matrices, step)]
    return [*found, inputs[slot], matrices[slot]]


def weighed(expert: int) -> list[Tensor]:
    """Experts of 2**20 and of 2**19 elements."""
    gate_up, down = at(expert, drawn(128, 8192), drawn(8192, 64, seed=1))
    weights = ExpertsWeights(
        expert + 1, LinearWeights(gate_up.flatten(0, 1)), LinearWeights(down.flatten(0, 1))
    )
    ids = torch.full((2, 1), expert, dtype=torch.int32)
    layer = experts.TritonExperts(weights, ActivationConfig())
    return [layer(drawn(2, 8192, seed=2), ids, torch.ones(2, 1))]


def looked_up(width: int) -> list[Tensor]:
    """Three lines of a block table."""
    table = reserve((3, width), torch.int32)
    last, blocks = torch.tensor([2]), torch.tensor([7], dtype=torch.int32)
    rows = captured(
        table, last, torch.tensor([width * 16 - 1]), last.int(), 16, previous_tokens=last,
        table_changes=(torch.tensor([3 * width - 1]), blocks),
    )  # fmt: skip
    (group,) = rows.groups
    decode_inputs.fill_decode_inputs(rows, group)
    return [group.slot_mapping]


@pytest.mark.parametrize(
    ("run", "near", "far"),
    [
        (cached, 1, LARGE // 512 + 1),
        (held, 1, LARGE // 16 + 1),
        pytest.param(weighed, 1, LARGE // 2**19 + 1, marks=pytest.mark.slow),
        (looked_up, 3, LARGE // 2),
    ],
)
def test_indices_of_large_tensors(run: Callable[[int], list[Tensor]], near: int, far: int) -> None:
    for found, expected in zip(run(far), run(near), strict=True):
        assert torch.equal(found, expected)
