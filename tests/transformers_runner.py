"""Runners of transformers' modules, in float32 on one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.transformers_model.config import TransformersConfig

SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 100,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "attention_backend": "torch",
}


def load(path: Path, *, trust_remote_code: bool = False, **overrides: Any) -> ModelRunner:
    model = TransformersConfig.from_directory(path, trust_remote_code=trust_remote_code)
    return build_model_runner(EngineConfig(**SETTINGS | overrides), model)
