"""Tiny random checkpoints, made on the spot with transformers.

Weights are drawn wide: with the usual standard deviation a tiny model repeats one token, and
a comparison of its greedy output would pass for any logits.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

import asyncllm

DEMO_MODEL = Path(asyncllm.__file__).parent / "demo_model"
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


def copy_tokenizer(path: Path) -> None:
    """Gives a checkpoint the packaged model's tokenizer, of 2048 tokens, and its chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, path / name)
