"""Contents of config.json files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncllm.checkpoint.model_config import ModelConfig

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
LLAMA = QWEN3 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def read(path: Path, values: dict[str, Any], generation: Any = None) -> ModelConfig:
    """What is made of a directory with these files."""
    (path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_directory(path)
