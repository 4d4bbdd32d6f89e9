"""A mixed step as a program of launches computes what it computes op by op, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.checkpoint.layer_config import LayerConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.core.batch import StepBatch
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.graph.mixed_steps import MixedSteps
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_groups
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.op_set import TritonOps
from asyncllm.gpu.state_cache import StateCache
from asyncllm.gpu.weights import dummy_weights
from tests.triton.decoder_steps import expert_fields, hybrid_fields, small_model

CPU, BLOCKS, CAPACITY = torch.device("cpu"), 40, 24

MODELS: dict[str, dict[str, Any]] = {
    "window": {},
    "hybrid": hybrid_fields(True, False),
    "exact hybrid": hybrid_fields(True, False),
    "experts": {**expert_fields(True, True), "sliding_layers": (), "sliding_window": None},
    "hybrid experts": {**hybrid_fields(False, True), **expert_fields(False, True)},
    "sinks": {"sinks": True, "qk_norm": False, "attention_bias": True, "output_bias": True},
    "gated": {"gated_attention": True, "embedding_multiplier": 3.0, "tie_word_embeddings": False},
    "whole norms": {
        "norms_whole_projections": True, "sliding_layers": (), "sliding_window": None,
        "activation": "gelu_tanh", "residual_multiplier": 0.5,
    },
    # The second layer reads the keys and values of the first.
    "lent": {
        "layers": (LayerConfig(2, 32, 160), LayerConfig(2, 32, 160, kv_layer=0)),
        "sliding_layers": (), "sliding_window": None,
    },
}  # fmt: skip

STEPS: list[tuple[int, list[int], list[int], list[bool]]] = [
    # Decodes, starts, counts, and the rows that are sampled.
    (0, [0, 20], [2, 3], [True, False]),
    (2, [2, 23, 0], [1, 1, 4], [True, True, True]),
    # Nothing is sampled: the last layer writes its KV, and no more.
    (0, [4], [2], [False]),
]
STATE_STEPS = [
    # A prompt, then chunks of one token; a chunk behind a checkpoint that is loaded, and decodes.
    (0, [0], [17], [True]),
    (0, [17], [1], [True]),
    (1, [18, 40], [1, 1], [True, False]),
    (2, [2, 23, 16], [1, 1, 3], [True, True, True]),
]
EXPERT_STEPS = [(1, [7, 0], [1, 17], [True, True])]

QUICK = "window", "hybrid experts", "lent"
HALF = "hybrid", "experts", "hybrid experts"
"""In bfloat16, in which chunks are products."""


def make(
    model: ModelConfig, dtype: torch.dtype
) -> tuple[Decoder, list[KVCacheSpec], list[KVCache]]:
    """The decoder, its KV groups, and the same cache for each of two ways."""
    attention = {
        kind: TritonAttention(kind.shape, dtype, CPU, capability=80, num_sms=16)
        for kind in attention_kinds(model)
    }
    weights = dummy_weights(model, dtype, CPU)
    decoder = build_decoder(model, TritonOps(), attention, weights)
    decoder.set_max_positions(128)
    groups, caches = kv_groups(model, attention, 16), []
    for _ in range(2):
        generator = torch.Generator().manual_seed(1)
        states = StateCache(decoder.states, 3, dtype, CPU, num_checkpoints=1)
        for state in states.tensors:
            state.normal_(generator=generator)
        caches.append(KVCache(groups, BLOCKS, dtype, CPU, states))
        caches[-1].tensor.normal_(generator=generator)
    return decoder, [group.spec for group in groups], caches


def states_of(cache: KVCache) -> list[Tensor]:
    return cache.states.tensors if cache.states else []


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS],
)
def test_hidden_states_are_those_of_the_ops_one_by_one(name: str) -> None:
    dtype = torch.bfloat16 if name in HALF else torch.float32
    decoder, specs, (own, plain) = make(replace(small_model(), **MODELS[name]), dtype)
    steps, batch = MixedSteps(decoder, own, CAPACITY), InputBatch(3, 128, specs)
    for group, table in enumerate(batch.tables):
        table.table[:] = 1 + (np.arange(24).reshape(3, 8) * 3 + group) % (BLOCKS - 1)
    tables = [torch.from_numpy(table.table) for table in batch.tables]
    batch.token_ids[:] = np.random.default_rng(0).integers(0, 300, batch.token_ids.shape)
    with torch.inference_mode():
        kinds = STEPS + STATE_STEPS * bool(decoder.states)
        kinds += EXPERT_STEPS * (not decoder.states and bool(decoder.model.experts))
        for decodes, starts, counts, samples in kinds:
            rows = [2] if len(counts) == 1 else list(range(len(counts)))
            step = StepBatch(0, rows, starts, counts, samples, num_decodes=decodes)
            inputs = batch.prepare(step, CPU, tables)
            loads = [(rows[-1], 1)] if starts[-1] == 16 else []
            fresh = [row for row, start in zip(rows, starts, strict=True) if not start]
            for cache in (own, plain):
                cache.load_states(loads)
                for state in states_of(cache):
                    state[fresh] = torch.nan
            for program in steps.programs:
                # NaN, as what is left of an earlier step would not be.
                program.memory.fill_(255)
            found = steps.forward(inputs).clone()
            assert steps.programs
            expected = decoder.forward(inputs, plain)
            assert found.shape == (sum(samples), decoder.model.hidden_size)
            assert torch.equal(found, expected), f"{decodes} decodes, {counts}"
            for mine, other in zip(own.layers, plain.layers, strict=True):
                assert torch.equal(mine, other)
            for mine, other in zip(states_of(own), states_of(plain), strict=True):
                assert torch.equal(mine[rows], other[rows])
    # Of up to 16 tokens, with small tiles, and larger ones.
    expected = [16, CAPACITY] if decoder.model.experts else [CAPACITY]
    assert [program.capacity for program in steps.programs] == expected
