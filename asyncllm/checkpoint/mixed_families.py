"""MOE_AND_HYBRID_FAMILIES: table of architectures with experts, recurrent or unequal layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.experts_config import (
    ActivationConfig,
    ExpertsConfig,
    ExpertsTensorNames,
    RoutingConfig,
)
from asyncllm.checkpoint.families import (
    FAMILIES,
    FULL_ATTENTION,
    MHA_DEFAULTS,
    SANDWICH_NORM_TENSOR_NAMES,
    SLIDING_ATTENTION,
    Family,
    Fields,
    ModelSizes,
    layer_mask_except_every_nth,
    layer_mask_from,
    read_biases,
    read_layer_types,
    read_nullable_window,
    read_optional_window,
    read_window,
)
from asyncllm.checkpoint.layer_config import (
    LayerConfig,
    PerLayerInputConfig,
    apply_head_overrides,
    apply_kv_sharing,
)
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.checkpoint.rope_config import (
    ROPE_PARAMETERS_FIELD,
    RopeConfig,
    RopeKind,
    read_rope_section,
)

LINEAR_ATTENTION = "linear_attention"

MAX_EXPERTS = 1024
MAX_HEADS, MAX_HEAD_DIM, MAX_CONV_WIDTH = 1024, 1024, 16


# --- readers shared by several families ------------------------------------------------------


def _read_routing(
    config: ConfigFile,
    *num_experts_fields: str,
    top_k_field: str = "num_experts_per_tok",
    **fields: Any,
) -> RoutingConfig:
    """Read the number of experts per layer, and per token.

    Args:
        num_experts_fields: fields that may have the number of experts per layer; the first that
            is present counts.
        top_k_field: name of the field with the number of experts per token.
        fields: other fields of RoutingConfig. Without ``renormalise``, the file's value is read.
    """
    config.choice("hidden_act", ("silu", "swish"), "silu")
    present = (name for name in num_experts_fields if name in config)
    name = next(present, num_experts_fields[0])
    count = config.integer(name, high=MAX_EXPERTS)
    top_k = config.integer(top_k_field, high=MAX_EXPERTS)
    if top_k > count:
        raise config.field_error(top_k_field, f"at most {name}={count}")
    if "renormalise" not in fields:
        fields["renormalise"] = config.boolean("norm_topk_prob", False)
    return RoutingConfig(count, top_k, **fields)


def _read_sparse_layers(config: ConfigFile, sizes: ModelSizes) -> tuple[bool, ...]:
    """Read which of Qwen's layers have experts: every ``decoder_sparse_step``-th layer, except
    those in ``mlp_only_layers``."""
    step = config.integer("decoder_sparse_step", 1)
    accepted = f"a list of layers from 0 to {sizes.num_layers - 1}"

    def is_layer_index(layer: Any) -> bool:
        return type(layer) is int and 0 <= layer < sizes.num_layers

    has_list = "mlp_only_layers" in config
    dense = config.checked_list("mlp_only_layers", accepted, is_layer_index) if has_list else []
    return tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(sizes.num_layers)
    )


def _read_expert_groups(config: ConfigFile, routing: RoutingConfig) -> RoutingConfig:
    """Read ``n_group`` and ``topk_group``. The chosen groups must have at least ``top_k`` experts
    together."""
    count, top_k = routing.num_experts, routing.top_k
    groups = config.integer("n_group", 1, high=count)
    if count % groups or (groups > 1 and count // groups < 2):
        raise config.field_error(
            "n_group", f"a divisor of n_routed_experts={count}, at most half of it"
        )
    top_groups, lowest = config.integer("topk_group", 1), -(-top_k // (count // groups))
    if not lowest <= top_groups <= groups:
        raise config.field_error(
            "topk_group",
            f"{lowest} to n_group={groups} groups of {count // groups} experts, for "
            f"num_experts_per_tok={top_k}",
        )
    return replace(routing, num_groups=groups, top_groups=top_groups)


def _read_qwen_experts(
    config: ConfigFile, layers: tuple[bool, ...], routing: RoutingConfig
) -> Fields:
    """Read Qwen's experts, which include a shared expert with a gate."""
    experts = ExpertsConfig(
        layers,
        routing,
        config.integer("moe_intermediate_size"),
        shared_expert_size=config.integer("shared_expert_intermediate_size"),
        has_shared_expert_gate=True,
        names=ExpertsTensorNames(shared_expert="mlp.shared_expert"),
    )
    return {"experts": experts}


def _read_deepseek_v3_experts(config: ConfigFile, sizes: ModelSizes) -> Fields:
    """Read experts with DeepSeek-V3's routing, in all but the first ``first_k_dense_replace``
    layers. The routing has sigmoid scores, groups and a correction bias (arXiv 2412.19437, section
    2.1.2).
    """
    routing = _read_routing(
        config,
        "n_routed_experts",
        "num_local_experts",
        scoring="sigmoid",
        min_weight_sum=1e-20,
        scale=config.number("routed_scaling_factor", 1.0, high=1e3, exclusive_low=True),
        has_correction_bias=True,
        is_float32=True,
    )
    routing = _read_expert_groups(config, routing)
    layers = layer_mask_from(config.integer("first_k_dense_replace", low=0), sizes.num_layers)
    size = config.integer("moe_intermediate_size")
    shared = size * config.integer("n_shared_experts", high=MAX_EXPERTS)
    return {"experts": ExpertsConfig(layers, routing, size, shared_expert_size=shared)}


# --- readers of configurations, one for each model family ------------------------------------


def _read_mixtral(config: ConfigFile, sizes: ModelSizes) -> Fields:
    experts = ExpertsConfig(
        (True,) * sizes.num_layers,
        _read_routing(config, "num_local_experts", "num_experts", renormalise=True),
        config.integer("intermediate_size"),
        names=ExpertsTensorNames(
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            projections=("w1", "w3", "w2"),
        ),
    )
    return {**FAMILIES["mistral"].read_fields(config, sizes), "experts": experts}


def _read_qwen2_moe(config: ConfigFile, sizes: ModelSizes) -> Fields:
    # In Qwen2-MoE every second layer below max_window_layers has the sliding window; in dense Qwen2
    # all layers from max_window_layers on have it.
    end = config.integer("max_window_layers", 28, low=0)
    layers = tuple(layer % 2 == 0 and layer < end for layer in range(sizes.num_layers))
    window = read_optional_window(config, sizes, layers)
    routing = _read_routing(config, "num_experts")
    experts = _read_qwen_experts(config, _read_sparse_layers(config, sizes), routing)
    return {"attention_bias": config.boolean("qkv_bias", True), **window, **experts}


def _read_qwen3_moe(config: ConfigFile, sizes: ModelSizes) -> Fields:
    experts = ExpertsConfig(
        _read_sparse_layers(config, sizes),
        _read_routing(config, "num_experts", "num_local_experts"),
        config.integer("moe_intermediate_size"),
    )
    window = read_optional_window(config, sizes, (True,) * sizes.num_layers)
    return {"qk_norm": True, **read_biases(config), **window, "experts": experts}


def _read_olmoe(config: ConfigFile, sizes: ModelSizes) -> Fields:
    if "clip_qkv" in config:
        raise config.field_error("clip_qkv", "null: projections are not clipped")
    experts = ExpertsConfig(
        (True,) * sizes.num_layers,
        _read_routing(config, "num_experts", "num_local_experts"),
        config.integer("intermediate_size"),
    )
    norms = {"qk_norm": True, "norms_span_all_heads": True}
    return {**norms, **read_biases(config), "experts": experts}


def _read_dots1(config: ConfigFile, sizes: ModelSizes) -> Fields:
    first = config.integer("max_window_layers", 62, low=0)
    window = read_nullable_window(config, layer_mask_from(first, sizes.num_layers))
    fields = {"qk_norm": True, **read_biases(config), **window}
    return {**fields, **_read_deepseek_v3_experts(config, sizes)}


def _read_glm4_moe(config: ConfigFile, sizes: ModelSizes) -> Fields:
    fields = {"qk_norm": config.boolean("use_qk_norm", False)}
    fields["attention_bias"] = config.boolean("attention_bias", False)
    return {**fields, **_read_deepseek_v3_experts(config, sizes)}


def _read_ernie4_5_moe(config: ConfigFile, sizes: ModelSizes) -> Fields:
    if config.boolean("use_bias", False):
        raise config.field_error("use_bias", "false: the output head has none")
    step = config.integer("moe_layer_interval", 1)
    first = config.integer("moe_layer_start_index", 1, low=0)
    last = config.integer("moe_layer_end_index", -1, low=-1)
    last = sizes.num_layers - 1 if last == -1 else last
    layers = tuple(
        (layer + 1) % step == 0 and first <= layer <= last for layer in range(sizes.num_layers)
    )
    routing = _read_routing(
        config,
        "moe_num_experts",
        top_k_field="moe_k",
        renormalise=True,
        min_weight_sum=config.number("moe_norm_min", 1e-12, high=1.0),
        has_correction_bias=True,
        correction_rows=1,
        is_float32=True,
    )
    size = config.integer("moe_intermediate_size")
    shared = size * config.integer("moe_num_shared_experts", 2, low=0, high=MAX_EXPERTS)
    names = ExpertsTensorNames(correction_bias="mlp.moe_statics.e_score_correction_bias")
    experts = ExpertsConfig(layers, routing, size, shared_expert_size=shared, names=names)
    return {"interleaved_rope": True, "experts": experts}


def _read_gpt_oss(config: ConfigFile, sizes: ModelSizes) -> Fields:
    limits = {"high": 1e6, "exclusive_low": True}
    experts = ExpertsConfig(
        (True,) * sizes.num_layers,
        # gpt-oss applies the softmax to the chosen experts' logits alone. A softmax over all
        # experts, renormalised over the chosen ones, is the same.
        _read_routing(config, "num_local_experts", "num_experts", renormalise=True, has_bias=True),
        config.integer("intermediate_size"),
        ActivationConfig(
            limit=config.number("swiglu_limit", 7.0, **limits),
            alpha=config.number("swiglu_alpha", 1.702, **limits),
        ),
        has_bias=True,
        names=ExpertsTensorNames(router="mlp.router", is_transposed=True),
    )
    window = read_window(config, layer_mask_except_every_nth(2, sizes.num_layers))
    return {"sinks": True, **read_biases(config, True), **window, "experts": experts}


# --- gated delta rules -----------------------------------------------------------------------


def _read_linear_layers(config: ConfigFile, sizes: ModelSizes) -> tuple[bool, ...]:
    """Read which layers have linear attention: those that ``layer_types`` names. Without that
    field, every ``full_attention_interval``-th layer has full attention, the others linear."""
    count = sizes.num_layers
    if "layer_types" not in config:
        interval = config.integer("full_attention_interval", 4)
        if interval > count:
            accepted = f"at most num_hidden_layers={count} (4 without it): some layer has attention"
            raise config.field_error("full_attention_interval", accepted)
        return layer_mask_except_every_nth(interval, sizes.num_layers)
    kinds = read_layer_types(config, count, LINEAR_ATTENTION)
    if FULL_ATTENTION not in kinds:
        raise config.field_error(
            "layer_types", f"a list of {FULL_ATTENTION}, at least once, and {LINEAR_ATTENTION}"
        )
    return tuple(kind == LINEAR_ATTENTION for kind in kinds)


def _read_gated_delta(
    config: ConfigFile, sizes: ModelSizes, *, grouped_by_key_head: bool = False
) -> Fields:
    """Read the fields of a model with gated-delta-rule layers and gated attention."""
    config.choice("hidden_act", ("silu", "swish"), "silu")
    if not config.boolean("attn_output_gate", True):
        raise config.field_error("attn_output_gate", "true: attention has a gate on its output")
    key_heads = config.integer("linear_num_key_heads", high=MAX_HEADS)
    value_heads = config.integer("linear_num_value_heads", high=MAX_HEADS)
    if value_heads % key_heads:
        accepted = f"a multiple of linear_num_key_heads={key_heads}"
        raise config.field_error("linear_num_value_heads", accepted)
    layers = _read_linear_layers(config, sizes)
    linear = LinearAttentionConfig(
        layers,
        key_heads,
        value_heads,
        config.integer("linear_key_head_dim", high=MAX_HEAD_DIM),
        config.integer("linear_value_head_dim", high=MAX_HEAD_DIM),
        config.integer("linear_conv_kernel_dim", low=2, high=MAX_CONV_WIDTH),
        grouped_by_key_head,
    )
    return {
        "qk_norm": True,
        "norm_offset": 1.0,
        "float32_norm_weights": True,
        "gated_attention": True,
        "linear_attention": linear if any(layers) else None,
        **read_biases(config),
    }


def _read_qwen3_5_moe(config: ConfigFile, sizes: ModelSizes) -> Fields:
    routing = _read_routing(config, "num_experts", renormalise=True)
    experts = _read_qwen_experts(config, (True,) * sizes.num_layers, routing)
    # Qwen3.5-MoE has no layer with an ordinary MLP, so the file has no ``intermediate_size``.
    dense = {"intermediate_size": config.integer("moe_intermediate_size")}
    return {**_read_gated_delta(config, sizes), **experts, **dense}


def _read_qwen3_next(config: ConfigFile, sizes: ModelSizes) -> Fields:
    routing = _read_routing(config, "num_experts")
    experts = _read_qwen_experts(config, _read_sparse_layers(config, sizes), routing)
    return {**_read_gated_delta(config, sizes, grouped_by_key_head=True), **experts}


# --- Gemma 4, whose layers differ in heads, KV and MLP size ----------------------------------


def _read_gemma4(config: ConfigFile, sizes: ModelSizes) -> Fields:
    """Read the fields of Gemma 4, dense or with experts beside the MLP of every layer."""
    if config.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise config.field_error(
            "use_bidirectional_attention", "null, or 'vision' for images alone"
        )
    window = read_window(config, layer_mask_except_every_nth(6, sizes.num_layers))
    # As in transformers, the last layer has full attention even if the file says sliding.
    is_sliding = (*window["sliding_layers"][:-1], False)
    kinds = tuple(SLIDING_ATTENTION if each else FULL_ATTENTION for each in is_sliding)
    ropes = {kind: _read_gemma4_rope(config, sizes, kind) for kind in sorted(set(kinds))}
    fields = {
        **read_biases(config),
        "qk_norm": True,
        "value_norm": True,
        "float32_norm_weights": True,
        "layer_scalar": True,
        "attention_scale": 1.0,
        "embedding_multiplier": sizes.hidden_size**0.5,
        "rounds_embedding_multiplier": True,
        "logits_softcap": config.number("final_logit_softcapping", None, exclusive_low=True),
        "sliding_window": window["sliding_window"] if any(is_sliding) else None,
        "sliding_layers": is_sliding,
        "layers": apply_kv_sharing(config, _read_gemma4_layers(config, is_sliding), kinds),
        "layer_ropes": tuple(ropes[kind] for kind in kinds),
    }
    if size := config.integer("hidden_size_per_layer_input", low=0):
        rows = config.integer("vocab_size_per_layer_input", low=config.integer("vocab_size"))
        fields["layer_input"] = PerLayerInputConfig(size, rows)
    if config.boolean("enable_moe_block", False):
        fields["experts"] = _read_gemma4_experts(config, sizes)
    return fields


def _read_gemma4_layers(config: ConfigFile, is_sliding: tuple[bool, ...]) -> list[LayerConfig]:
    """Read the sizes of each layer. Full-attention layers differ from sliding ones in the number
    and size of heads. Files of transformers 5.20 and later list them per layer; earlier files have
    one value for all full-attention layers.
    """
    shared = config.boolean("attention_k_eq_v", False)
    sliding = LayerConfig(
        config.integer("num_key_value_heads"),
        config.integer("head_dim"),
        config.integer("intermediate_size"),
    )
    full = replace(sliding, value_is_key=shared)
    if "per_layer_config" not in config:
        heads = config.integer("num_global_key_value_heads", sliding.num_kv_heads)
        full = replace(
            full,
            num_kv_heads=heads if shared else sliding.num_kv_heads,
            head_dim=config.integer("global_head_dim", 512),
        )
    return apply_head_overrides(config, [sliding if each else full for each in is_sliding])


def _read_gemma4_rope(config: ConfigFile, sizes: ModelSizes, kind: str) -> RopeConfig:
    sections = config.section(ROPE_PARAMETERS_FIELD)
    if ROPE_PARAMETERS_FIELD not in config:
        sections = ConfigFile(config.path, _GEMMA4_DEFAULT_ROPES)
    section = sections.section(kind)
    section.choice("rope_type", ("default", "proportional"))
    theta = section.number("rope_theta", exclusive_low=True)
    aliases: dict[str, RopeKind] = {"proportional": "proportional"}
    return read_rope_section(section, config, theta, sizes.rotary_dim, aliases)


def _read_gemma4_experts(config: ConfigFile, sizes: ModelSizes) -> ExpertsConfig:
    return ExpertsConfig(
        (True,) * sizes.num_layers,
        _read_routing(
            config,
            "num_experts",
            top_k_field="top_k_experts",
            renormalise=True,
            has_expert_scale=True,
        ),
        config.integer("moe_intermediate_size"),
        ActivationConfig(gelu=True),
        parallel_to_mlp=True,
        names=ExpertsTensorNames(router="router.proj", experts=None, fused_experts="experts"),
    )


# --- the families ----------------------------------------------------------------------------

_GPT_OSS_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GATED_DELTA_DEFAULTS: Fields = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_GEMMA4_DEFAULT_ROPES = {
    FULL_ATTENTION: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 1e4},
}
_GEMMA4_DEFAULTS = {
    "vocab_size": 262_144,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
}

MOE_AND_HYBRID_FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        (2,),
        read_fields=_read_mixtral,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", {"sliding_window": 4096}, read_fields=_read_qwen2_moe
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {"sliding_window": 4096}, read_fields=_read_qwen3_moe
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        MHA_DEFAULTS | {"rms_norm_eps": 1e-5},
        (50_279,),
        read_fields=_read_olmoe,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        MHA_DEFAULTS | {"sliding_window": 4096, "first_k_dense_replace": 0},
        read_fields=_read_dots1,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 1,
        },
        partial_rotary_factor=0.5,
        read_fields=_read_glm4_moe,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0},
        (2,),
        read_fields=_read_ernie4_5_moe,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rope_parameters": _GPT_OSS_DEFAULT_ROPE,
        },
        read_fields=_read_gpt_oss,
    ),
    # Qwen3.5's multimodal RoPE has a time, a height and a width position. Text tokens have the
    # same value for all three, so plain RoPE computes the same.
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _GATED_DELTA_DEFAULTS,
        partial_rotary_factor=0.25,
        can_be_text_part=True,
        read_fields=_read_gated_delta,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _GATED_DELTA_DEFAULTS,
        partial_rotary_factor=0.25,
        can_be_text_part=True,
        read_fields=_read_qwen3_5_moe,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _GATED_DELTA_DEFAULTS | {"norm_topk_prob": True},
        partial_rotary_factor=0.25,
        read_fields=_read_qwen3_next,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        _GEMMA4_DEFAULTS,
        (1,),
        tensor_names=SANDWICH_NORM_TENSOR_NAMES,
        activation_field="hidden_activation",
        can_be_text_part=True,
        read_fields=_read_gemma4,
    ),
}
"""Families by ``model_type``."""
