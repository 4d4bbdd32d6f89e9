"""Tiny random checkpoints, made on the spot with transformers.

Weights are drawn wide: with the usual standard deviation a tiny model repeats one token, and
a comparison of its greedy output would pass whatever the model computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from asyncllm.model_config import ModelConfig, RopeConfig

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def make_checkpoint(
    path: Path, architecture: str, *, seed: int = 0, shard: str = "1GB", **overrides: Any
) -> torch.nn.Module:
    """Writes a float32 checkpoint to ``path`` and returns transformers' model of it."""
    stem = architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, stem + "Config")(**(COMMON | overrides))
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 0.2 if "embed" in name else 2.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
            else:
                middle = 0.0 if name.endswith("bias") else 1.0
                parameter.normal_(middle, 0.2, generator=generator)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def config_of(path: Path, model: Any) -> ModelConfig:
    """ModelConfig of a model made here."""
    config, name = model.config, type(model).__name__
    rope = dict(getattr(config, "rope_parameters", None) or {})
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    sliding = tuple(kind == "sliding_attention" for kind in layers or ())
    if layers is None and window is not None:
        sliding = (True,) * config.num_hidden_layers
    bias = bool(getattr(config, "attention_bias", name == "Qwen2ForCausalLM"))
    return ModelConfig(
        path=path,
        architecture=name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope=RopeConfig(
            theta=rope.get("rope_theta", 10_000.0),
            kind=rope.get("rope_type", "default"),
            factor=rope.get("factor", 1.0),
            low_freq_factor=rope.get("low_freq_factor", 1.0),
            high_freq_factor=rope.get("high_freq_factor", 4.0),
            original_max_position=rope.get("original_max_position_embeddings", 8192),
        ),
        tie_word_embeddings=config.tie_word_embeddings,
        qk_norm=name == "Qwen3ForCausalLM",
        attention_bias=bias,
        output_bias=bias and name != "Qwen2ForCausalLM",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        sliding_window=window if any(sliding) else None,
        sliding_layers=sliding,
    )
