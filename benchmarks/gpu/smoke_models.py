"""Small models of every kind of layer that has kernels of its own, by their ``config.json``."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": None,
    "bos_token_id": None,
    "dtype": "float32",
}
_SLIDING = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}


def _model(architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    named = {"architectures": [architecture], "model_type": model_type}
    return {**_SIZES, **named, **settings}


MODELS: dict[str, dict[str, Any]] = {
    "dense": _model("Qwen3ForCausalLM", "qwen3"),
    # Windows, soft caps, GELU, and norms that round once.
    "windows": _model(
        "Gemma2ForCausalLM",
        "gemma2",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=64,
        attn_logit_softcapping=30.0,
        final_logit_softcapping=20.0,
        **_SLIDING,
    ),
    # Sinks, and clamped experts with biases, behind windows.
    "sinks": _model("GptOssForCausalLM", "gpt_oss", **_SLIDING, **_EXPERTS),
    "experts": _model("Qwen3MoeForCausalLM", "qwen3_moe", norm_topk_prob=True, **_EXPERTS),
    # Several KV groups: layers of one kind are more than those of the other.
    "groups": _model(
        "Gemma3ForCausalLM",
        "gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=64,
        num_hidden_layers=5,
        sliding_window=24,
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
    ),
    # Heads of 512 in full layers, a norm of values, and last layers that read another's KV.
    "wide heads": _model(
        "Gemma4ForCausalLM",
        "gemma4_text",
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        global_head_dim=512,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
        },
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=1024,
        final_logit_softcapping=30.0,
    ),
    # Gated delta rules with their convolutions and gated norms, beside attention with a gate.
    "hybrid": _model(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
}
"""By what they are there for."""
