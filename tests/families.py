"""Tiny random checkpoints of many model families, made on the spot with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TINY: dict[str, Any] = {
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
SLIDING = {"sliding_window": 7}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MOE = {
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96}

CASES: dict[str, dict[str, Any]] = {
    "Cohere": {},
    "Cohere2": {"head_dim": 16, **SLIDING, **MIXED},
    "GPT2": {"class": "GPT2LMHeadModel", **GPT2},
    "GPTNeoX": {},
    "Gemma": {"head_dim": 16},
    "Gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 10.0,
        "tie_word_embeddings": True,
        **SLIDING,
        **MIXED,
    },
    "Gemma3": {
        "config": "Gemma3TextConfig",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        **SLIDING,
        **MIXED,
    },
    "Glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "Granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
    },
    "Llama": {},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Olmo": {"clip_qkv": 2.0},
    "Olmo2": {},
    "Olmo3": {**SLIDING, **MIXED},
    "Phi": {"partial_rotary_factor": 0.5},
    "Phi3": {"partial_rotary_factor": 0.5},
    "Qwen3": {"head_dim": 16},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "StableLm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "Starcoder2": {**SLIDING},
    "GptOss": {"head_dim": 16, **SLIDING, **MIXED, **MOE},
    "Mixtral": {**MOE},
    "Olmoe": {**MOE},
    "Qwen3Moe": {"head_dim": 16, "norm_topk_prob": True, **MOE},
}


def make(path: Path, family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Writes a float32 checkpoint to ``path`` and returns transformers' model of it.

    Weights are drawn wide around what the family starts from, so that outputs vary, and that
    norms of weight ``1 + w`` keep their sense."""
    settings = TINY | CASES.get(family, {}) | overrides
    model_class = getattr(transformers, settings.pop("class", f"{family}ForCausalLM"))
    config = getattr(transformers, settings.pop("config", f"{family}Config"))(**settings)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    draw_weights(model, seed)
    model.save_pretrained(path)
    return model


def draw_weights(model: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 0.2 if "embed" in name or "wte" in name else 2.0 * parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
            else:
                parameter.normal_(float(parameter.mean().round()), 0.2, generator=generator)
