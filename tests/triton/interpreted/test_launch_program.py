"""A mixed step as a program of launches computes what it computes op by op, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

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
from asyncllm.gpu.weights import dummy_weights
from tests.triton.decoder_steps import small_model

CPU, BLOCKS, CAPACITY = torch.device("cpu"), 40, 6

MODELS: dict[str, dict[str, Any]] = {
    "window": {},
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


def make(model: ModelConfig) -> tuple[Decoder, list[KVCacheSpec], list[KVCache]]:
    """The decoder, its KV groups, and the same cache for each of two ways."""
    attention = {
        kind: TritonAttention(kind.shape, torch.float32, CPU, capability=80, num_sms=16)
        for kind in attention_kinds(model)
    }
    weights = dummy_weights(model, torch.float32, CPU)
    decoder = build_decoder(model, TritonOps(), attention, weights)
    decoder.set_max_positions(128)
    groups = kv_groups(model, attention, 16)
    caches = [KVCache(groups, BLOCKS, torch.float32, CPU) for _ in range(2)]
    caches[0].tensor.normal_(generator=torch.Generator().manual_seed(1))
    caches[1].tensor.copy_(caches[0].tensor)
    return decoder, [group.spec for group in groups], caches


@pytest.mark.parametrize(
    "name",
    [
        next(iter(MODELS)),
        *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "window"),
    ],
)
def test_hidden_states_are_those_of_the_ops_one_by_one(name: str) -> None:
    decoder, specs, (own, plain) = make(replace(small_model(), **MODELS[name]))
    steps, batch = MixedSteps(decoder, own, CAPACITY), InputBatch(3, 128, specs)
    for group, table in enumerate(batch.tables):
        table.table[:] = 1 + (np.arange(24).reshape(3, 8) * 3 + group) % (BLOCKS - 1)
    tables = [torch.from_numpy(table.table) for table in batch.tables]
    batch.token_ids[:] = np.random.default_rng(0).integers(0, 300, batch.token_ids.shape)
    with torch.inference_mode():
        for decodes, starts, counts, samples in STEPS:
            rows = [2] if len(counts) == 1 else list(range(len(counts)))
            step = StepBatch(0, rows, starts, counts, samples, num_decodes=decodes)
            inputs = batch.prepare(step, CPU, tables)
            if steps.program is not None:
                # NaN, as what is left of an earlier step would not be.
                steps.program.memory.fill_(255)
            found = steps.forward(inputs).clone()
            assert steps.program is not None
            expected = decoder.forward(inputs, plain)
            assert found.shape == (sum(samples), decoder.model.hidden_size)
            assert torch.equal(found, expected), f"{decodes} decodes, {counts}"
            for mine, other in zip(own.layers, plain.layers, strict=True):
                assert torch.equal(mine, other)
