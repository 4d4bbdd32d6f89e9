"""Tiny random checkpoints of many model families, made on the spot with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import COMMON

TINY: dict[str, Any] = {**COMMON, "eos_token_id": 255}
SLIDING = {"sliding_window": 7}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MOE = {
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96}

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.2, 2.4, 2.6]}
LONGROPE |= {"long_factor": [1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 9.0]}
MINISTRAL = YARN | {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
TWO_ROPES = {
    "full_attention": YARN | {"rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
LATENT |= {"v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4}
GROUPS = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

GATED_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
GATED_DELTA |= {"linear_value_head_dim": 8, "head_dim": 16}
GATED_DELTA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GATED_DELTA |= {"gain": 1.3}
CONV = {"layer_types": ["conv", "full_attention", "conv"], "gain": 1.3}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "gain": 1.3}

GEMMA4 = {"config": "Gemma4TextConfig", "head_dim": 16, "global_head_dim": 32, **SLIDING}
GEMMA4 |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8}
GEMMA4 |= {"vocab_size_per_layer_input": 256}
GEMMA4 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}

CASES: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "Bamba": {"attn_layer_indices": [1], "mamba_n_groups": 1, **MAMBA},
    "Cohere": {},
    "Cohere2": {"head_dim": 16, **SLIDING, **MIXED},
    "DeepseekV3": {**LATENT, **MOE, **GROUPS},
    "Dots1": {"head_dim": 16, "n_shared_experts": 1, **MOE, **GROUPS},
    "Ernie4_5": {"head_dim": 16},
    "Ernie4_5_Moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
        **MOE,
    },
    "Exaone4": {**SLIDING, **MIXED},
    "FalconH1": {
        **MAMBA,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
    },
    "GPT2": {"class": "GPT2LMHeadModel", **GPT2},
    "GPTNeoX": {},
    "Gemma": {"head_dim": 16},
    "Gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 10.0,
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
    "Gemma4": GEMMA4,
    "Gemma4-shared": {
        **GEMMA4,
        "gain": 1.2,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "Gemma4-experts": {
        **GEMMA4,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "Glm": {"head_dim": 16},
    "Glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "Glm4Moe": {"head_dim": 16, **MOE, **GROUPS},
    "Glm4MoeLite": {**LATENT, **MOE, **GROUPS},
    "GptOss": {"head_dim": 16, **SLIDING, **MIXED, **MOE},
    "Granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "GraniteMoe": {"gain": 1.0, **MOE},
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        **MAMBA,
        "gain": 1.0,
    },
    "Helium": {"head_dim": 16},
    "HunYuanDenseV1": {"head_dim": 16},
    "KimiLinear": {
        **LATENT,
        **MOE,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "gain": 1.0,
    },
    "Lfm2": {**CONV},
    "Lfm2Moe": {"num_dense_layers": 1, **CONV, **MOE},
    "Lfm3": {**CONV},
    "Llama": {"tie_word_embeddings": True},
    "Llama-yarn": {"rope_parameters": YARN},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "gain": 1.3},
    "MiniMaxM2": {"head_dim": 16, "rotary_dim": 8, **MOE},
    "Ministral3": {
        "head_dim": 16,
        "rope_parameters": {**YARN, "mscale": 1.0, "llama_4_scaling_beta": 0.5},
        "gain": 1.3,
    },
    "Mistral": {**SLIDING},
    "Mixtral": {**MOE},
    "Nemotron": {"gain": 1.3},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Olmo": {"clip_qkv": 2.0},
    "Olmo2": {},
    "Olmo3": {**SLIDING, **MIXED},
    "OlmoHybrid": {**GATED_DELTA, "gain": 1.0},
    "Olmoe": {**MOE},
    "Phi": {"partial_rotary_factor": 0.5},
    "Phi3": {"partial_rotary_factor": 0.5},
    "Phi3-longrope": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 32,
    },
    "Phimoe": {**MOE},
    "Qwen2": {},
    "Qwen2Moe": {"shared_expert_intermediate_size": 32, **MOE},
    "Qwen3": {"head_dim": 16},
    "Qwen3_5": {"config": "Qwen3_5TextConfig", **GATED_DELTA},
    "Qwen3_5Moe": {
        "config": "Qwen3_5MoeTextConfig",
        "shared_expert_intermediate_size": 32,
        **GATED_DELTA,
        **MOE,
        "gain": 1.0,
    },
    "Qwen3Moe": {"head_dim": 16, "norm_topk_prob": True, **MOE},
    "Qwen3Next": {"shared_expert_intermediate_size": 32, **GATED_DELTA, **MOE},
    "SeedOss": {"head_dim": 16},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "StableLm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "Starcoder2": {**SLIDING},
}
"""Settings by family; what follows a hyphen is a variant of it."""

NEMOTRON_H = {
    "layers_block_type": ["mamba", "attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "head_dim": 16,
    "gain": 1.3,
}
"""Not among them: transformers bounds its time steps from below in a chunk, and not in a decode."""

SEEDS = {
    "Bamba": 2,
    "DeepseekV3": 2,
    "GPT2": 13,
    "Granite": 4,
    "Mixtral": 6,
    "OPT": 4,
    "Olmo2": 1,
}
SEEDS |= {
    "OlmoHybrid": 1,
    "Qwen3Next": 2,
    "Qwen3_5": 3,
    "Gemma4-shared": 16,
    "Phi3": 1,
    "Phi3-longrope": 3,
    "Qwen3": 1,
}
"""Where 0 gives a model that repeats itself."""


def make(path: Path, family: str, **overrides: Any) -> Any:
    """Writes a float32 checkpoint to ``path`` and returns transformers' model of it.

    Weights are drawn wide around what the family starts from, so that outputs vary, and that
    norms of weight ``1 + w`` keep their sense."""
    settings = TINY | CASES.get(family, {}) | overrides
    seed, gain = settings.pop("seed", SEEDS.get(family, 0)), settings.pop("gain", 1.6)
    embedding = settings.pop("embedding", 0.2)
    shard = settings.pop("shard", "1GB")
    family = family.partition("-")[0]
    model_class = getattr(transformers, settings.pop("class", f"{family}ForCausalLM"))
    config = getattr(transformers, settings.pop("config", f"{family}Config"))(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        # What a family starts from is drawn as well.
        torch.manual_seed(seed)
        model = model_class(config).eval()
    draw_weights(model, seed, gain, embedding)
    # Without the family's own ids of ends, which are beyond this vocabulary.
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(path, max_shard_size=shard)
    return model


def draw_weights(
    model: torch.nn.Module, seed: int = 0, gain: float = 1.6, embedding: float = 0.2
) -> None:
    """Draws matrices of ``gain`` around what keeps activations of order 1. A head that is tied to
    wide embeddings predicts each token again."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                table = "embed" in name or "wte" in name
                scale = embedding if table else gain * parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
            elif name.endswith("linear_attn.A_log"):
                # A state that lasts some tokens: one that decays at once shows no mistake in it.
                parameter.normal_(-2.0, 0.2, generator=generator)
            else:
                parameter.normal_(float(parameter.mean().round()), 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2, generator=generator)
