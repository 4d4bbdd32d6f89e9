"""Runners of a small model with dummy weights, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from asyncllm.checkpoint.model_config import ModelConfig, RopeConfig
from asyncllm.config import EngineConfig
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.model_runner import ModelRunner

MODEL = ModelConfig(
    path=Path("nowhere"),
    architecture="LlamaForCausalLM",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
)
LARGE = replace(MODEL, vocab_size=100_000, hidden_size=512, num_heads=64)


def make(model: ModelConfig = MODEL, **fields) -> ModelRunner:
    settings = {"load_format": "dummy", "device": "cpu", "max_num_batched_tokens": 512}
    return build_model_runner(EngineConfig(**(settings | fields)), model)
