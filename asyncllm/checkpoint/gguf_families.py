"""GGUF_FAMILIES: table of the supported architectures of GGUF files.

Each row has data that a GGUF file leaves out: the class in transformers, the meaning of metadata
keys, and rules of llama.cpp's code, for example for the layers with a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_EXPERT_COUNT_FIELDS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN_MOE_FIELDS = _EXPERT_COUNT_FIELDS | {"expert_feed_forward_length": "moe_intermediate_size"}
_QWEN_SHARED_EXPERT_FIELDS = _QWEN_MOE_FIELDS | {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size"
}
_DEEPSEEK_FIELDS = _QWEN_MOE_FIELDS | {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_GATED_DELTA_FIELDS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """Rules by which a GGUF file of one architecture is read.

    Attributes:
        architecture: transformers' class.
        fields: fields of config.json by metadata key, beside those of all architectures.
        constants: fields of config.json that the metadata lacks, or may leave out.
        required_keys: metadata keys that a file must have.
        expected_values: the only supported value of each metadata key; a file may leave the key
            out.
        extra_keys: further metadata keys that a file may have: some are read only for this
            architecture, others do not change the model for text.
        permutes_heads: whether rows of q and k are stored in the order that llama.cpp's RoPE needs.
        grouped_gates_tensor: name of the tensor with both gates of linear attention, grouped by
            key head. "" if each gate has its own tensor; then the value heads are stored in the
            order ``[value heads per key head, key heads]``, instead of the reverse.
        full_attention_interval: interval of full-attention layers among sliding-window layers; 0 if
            all layers have a sliding window; None if no sliding window is supported.
        has_partial_rope: whether ``rope.dimension_count`` may be less than the head size.
        hidden_scale_num_layers: a model with this number of layers scales queries by its hidden
            size divided by its number of heads; all other models scale by their head size. 0 if the
            architecture has no such model.
        yarn_parameters: further RoPE parameters of YaRN, which the metadata lacks.
        variant: pair ``(key, family)`` for an architecture name that two models share: a file
            whose metadata has ``key``, with a value other than 0, is read by ``family``.
    """

    architecture: str
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    required_keys: tuple[str, ...] = ()
    expected_values: Mapping[str, Any] = field(default_factory=dict)
    extra_keys: tuple[str, ...] = ()
    permutes_heads: bool = False
    grouped_gates_tensor: str = ""
    full_attention_interval: int | None = None
    has_partial_rope: bool = False
    hidden_scale_num_layers: int = 0
    yarn_parameters: Mapping[str, Any] = field(default_factory=dict)
    variant: tuple[str, GGUFFamily] | None = None


_LLAMA_FAMILY = GGUFFamily("LlamaForCausalLM", permutes_heads=True)
_SLIDING_ROPE_KEY = "rope.freq_base_swa"
_ATTENTION_TEMPERATURE_KEY = "attention.temperature_scale"
_SIGMOID_GATING_VALUES = {"expert_gating_func": 2}
_QWEN3_5_FAMILY = GGUFFamily(
    "Qwen3_5ForCausalLM",
    _GATED_DELTA_FIELDS,
    # The sections of M-RoPE do not matter: a text token has the same position in each.
    extra_keys=(
        *("rope.dimension_sections", "nextn_predict_layers"),
        *("ssm.inner_size", "attention.recurrent_layers"),
    ),
    has_partial_rope=True,
)
_QWEN3_5_MOE_FAMILY = replace(
    _QWEN3_5_FAMILY,
    architecture="Qwen3_5MoeForCausalLM",
    fields=_GATED_DELTA_FIELDS | _QWEN_SHARED_EXPERT_FIELDS,
)

GGUF_FAMILIES: dict[str, GGUFFamily] = {
    # Files of Mistral and Mixtral have the architecture "llama" too.
    "llama": replace(
        _LLAMA_FAMILY,
        variant=(
            "expert_count",
            replace(
                _LLAMA_FAMILY,
                architecture="MixtralForCausalLM",
                fields=_EXPERT_COUNT_FIELDS | {"expert_count": "num_local_experts"},
            ),
        ),
    ),
    "mistral3": replace(
        _LLAMA_FAMILY,
        extra_keys=(_ATTENTION_TEMPERATURE_KEY,),
        variant=(
            _ATTENTION_TEMPERATURE_KEY,
            replace(
                _LLAMA_FAMILY,
                architecture="Ministral3ForCausalLM",
                extra_keys=(_ATTENTION_TEMPERATURE_KEY,),
            ),
        ),
    ),
    "smollm3": replace(_LLAMA_FAMILY, architecture="SmolLM3ForCausalLM"),
    "granite": replace(
        _LLAMA_FAMILY,
        architecture="GraniteForCausalLM",
        fields={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        required_keys=("attention.scale", "logit_scale"),
        expected_values={"rope.scaling.finetuned": True},
        # Files of dense Granite 4 models have sizes of experts and of state-space layers, but
        # tensors of neither.
        extra_keys=(
            *("expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.group_count"),
            *("ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"),
        ),
    ),
    "qwen2": GGUFFamily("Qwen2ForCausalLM"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM"),
    "qwen2moe": GGUFFamily(
        "Qwen2MoeForCausalLM",
        _QWEN_SHARED_EXPERT_FIELDS,
        {"norm_topk_prob": False},
    ),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", _QWEN_MOE_FIELDS, {"norm_topk_prob": True}),
    # Qwen3-Next is stored like Qwen3.5, except that value heads are not reordered and gates are
    # grouped by key head.
    "qwen3next": replace(_QWEN3_5_MOE_FAMILY, grouped_gates_tensor="ssm_ba.weight"),
    "qwen35": _QWEN3_5_FAMILY,
    "qwen35moe": _QWEN3_5_MOE_FAMILY,
    "gemma2": GGUFFamily(
        "Gemma2ForCausalLM",
        fields={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        constants={"sliding_window": 4096},
        full_attention_interval=2,
        hidden_scale_num_layers=46,
    ),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM",
        fields={"final_logit_softcapping": "final_logit_softcapping"},
        extra_keys=(_SLIDING_ROPE_KEY,),
        full_attention_interval=6,
        hidden_scale_num_layers=62,
    ),
    "phi3": GGUFFamily(
        "Phi3ForCausalLM",
        full_attention_interval=0,
        has_partial_rope=True,
    ),
    "olmo2": GGUFFamily(
        "Olmo2ForCausalLM",
        variant=(
            "attention.sliding_window",
            GGUFFamily(
                "Olmo3ForCausalLM",
                extra_keys=(_SLIDING_ROPE_KEY,),
                full_attention_interval=4,
            ),
        ),
    ),
    "olmoe": GGUFFamily(
        "OlmoeForCausalLM",
        _EXPERT_COUNT_FIELDS | {"expert_feed_forward_length": "intermediate_size"},
        {"norm_topk_prob": False},
    ),
    "glm4": GGUFFamily("Glm4ForCausalLM", has_partial_rope=True),
    "glm4moe": GGUFFamily(
        "Glm4MoeForCausalLM",
        _DEEPSEEK_FIELDS,
        {"num_nextn_predict_layers": 0},
        expected_values=_SIGMOID_GATING_VALUES,
        extra_keys=("nextn_predict_layers",),
        has_partial_rope=True,
    ),
    "dots1": GGUFFamily(
        "Dots1ForCausalLM",
        _DEEPSEEK_FIELDS,
        {"sliding_window": None, "num_nextn_predict_layers": 0},
        expected_values=_SIGMOID_GATING_VALUES,
    ),
    "gpt-oss": GGUFFamily(
        "GptOssForCausalLM",
        _EXPERT_COUNT_FIELDS
        | {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
        full_attention_interval=2,
        yarn_parameters={"truncate": False},
    ),
}
"""Rules for reading GGUF files, by the metadata's ``general.architecture``."""
