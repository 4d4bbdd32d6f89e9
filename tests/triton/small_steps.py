"""Runners of small models with Triton's kernels, none of which is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from asyncllm.checkpoint.experts_config import ActivationConfig, ExpertsConfig, RoutingConfig
from asyncllm.checkpoint.layer_config import LayerConfig
from asyncllm.core.batch import StepBatch
from asyncllm.core.executor import ExecutorInfo
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.model_runner import Graphs, ModelRunner
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_groups
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.op_set import TritonOps
from asyncllm.gpu.state_cache import StateCache
from asyncllm.gpu.weights import dummy_weights
from tests.static_runner import queue_mixed_step
from tests.triton.decoder_steps import hybrid_fields, small_model, wide_fields

CPU = torch.device("cpu")
H200 = {"capability": 90, "num_sms": 132}
ROWS = 64

MOE = ExpertsConfig((True,) * 2, RoutingConfig(8, 2), intermediate_size=48)
"""More than 16 tokens an expert from 65 tokens on."""

MODELS: dict[str, dict[str, Any]] = {
    "window": {},
    # Sinks, and clamped experts with biases, as gpt-oss has them.
    "sinks": {
        "sinks": True,
        "qk_norm": False,
        "attention_bias": True,
        "output_bias": True,
        "experts": replace(MOE, activation=ActivationConfig(7.0, 1.7), bias=True),
    },
    "experts": {"experts": replace(MOE, shared_size=32, shared_gate=True)},
    # Three KV groups, heads of 512 in one, and what Gemma has beside.
    "groups": {
        "num_layers": 3,
        "layers": (LayerConfig(8, 32, 160), LayerConfig(4, 512, 160), LayerConfig(8, 32, 160)),
        "sliding_layers": (True, False, True),
        "activation": "gelu",
        "attention_softcap": 50.0,
        "logits_softcap": 30.0,
        "norm_offset": 1.0,
        "float32_norm_weights": True,
    },
    "wide heads": wide_fields(8),
    "whole norms": {"norms_whole_projections": True, "sliding_layers": (), "sliding_window": None},
    "hybrid": hybrid_fields(True, False),
}


def make_step(
    max_len: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    token_sizes: tuple[int, ...] = (),
    **fields: Any,
) -> ModelRunner:
    sizes_of = {"num_heads": 16, "num_kv_heads": 8, "max_position_embeddings": max_len}
    model = replace(small_model(), **{**fields, **sizes_of})
    attention = {
        kind: TritonAttention(kind.shape, dtype, CPU, **H200) for kind in attention_kinds(model)
    }
    decoder = build_decoder(model, TritonOps(), attention, dummy_weights(model, dtype, CPU))
    decoder.set_max_positions(max_len)
    groups = kv_groups(model, attention, 16)
    info = ExecutorInfo(
        vocab_size=model.vocab_size,
        num_blocks=32,
        kv_groups=tuple(group.spec for group in groups),
        max_model_len=max_len,
        max_num_seqs=ROWS,
        max_num_batched_tokens=8192,
        pipeline_depth=2,
    )
    states = StateCache(decoder.states, ROWS, dtype, CPU) if decoder.states else None
    cache = KVCache(groups, 32, dtype, CPU, states)
    return ModelRunner(decoder, cache, info, graphs=Graphs(GraphCapturer(), sizes, token_sizes))


def mixed_step(runner: ModelRunner, decodes: int, prompt: int, prefix: int = 0) -> None:
    """Queues a step of so many decodes and a prompt behind a prefix."""
    given = StepBatch(
        step=0,
        req_indices=list(range(decodes + 1)),
        starts=[100] * decodes + [prefix],
        counts=[1] * decodes + [prompt],
        samples=[True] * (decodes + 1),
        num_decodes=decodes,
    )
    queue_mixed_step(runner, given)
