"""Runners of small models with Triton's kernels, none of which is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from asyncllm.checkpoint.experts_config import ActivationConfig, ExpertsConfig, RoutingConfig
from asyncllm.checkpoint.layer_config import LayerConfig
from asyncllm.core.batch import StepBatch
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.model_runner import ModelRunner
from tests.static_runner import LateStream, make_runner, queue_mixed_step
from tests.triton.decoder_steps import hybrid_fields, small_model, triton_decoder, wide_fields

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
        "experts": replace(MOE, activation=ActivationConfig(7.0, 1.7), has_bias=True),
    },
    "experts": {"experts": replace(MOE, shared_expert_size=32, has_shared_expert_gate=True)},
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
    "whole norms": {"norms_span_all_heads": True, "sliding_layers": (), "sliding_window": None},
    "hybrid": hybrid_fields(True, False),
}


def make_step(
    max_len: int, sizes: tuple[int, ...], dtype: torch.dtype, token_counts: tuple[int, ...] = (), *,
    stream: LateStream | None = None, **fields: Any,
) -> ModelRunner:  # fmt: skip
    """A runner for an H200: 132 multiprocessors, compute capability 9.0."""
    sizes_of = {"num_heads": 16, "num_kv_heads": 8, "max_position_embeddings": max_len}
    model = replace(small_model(), **{**fields, **sizes_of})
    decoder = triton_decoder(model, dtype, max_len, capability=90, num_sms=132)
    return make_runner(
        decoder, capturer=GraphCapturer(), stream=stream, sizes=sizes, token_counts=token_counts,
        max_num_seqs=ROWS, num_blocks=31, block_size=16, max_len=max_len, max_tokens=8192,
    )  # fmt: skip


def mixed_step(runner: ModelRunner, decodes: int, prompt: int, prefix: int = 0) -> None:
    """Queues a step of so many decodes and a prompt behind a prefix."""
    starts, counts = [100] * decodes + [prefix], [1] * decodes + [prompt]
    rows = list(range(decodes + 1))
    queue_mixed_step(runner, StepBatch(0, rows, starts, counts, [True] * len(rows), decodes))
