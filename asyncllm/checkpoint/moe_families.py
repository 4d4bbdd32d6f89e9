"""MOE_FAMILIES: the mixture-of-experts architectures, as data."""

from __future__ import annotations

from typing import Any

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.experts_config import (
    ActivationConfig,
    ExpertsConfig,
    ExpertsNames,
    RoutingConfig,
)
from asyncllm.checkpoint.families import (
    FAMILIES,
    MULTI_HEAD,
    Family,
    Fields,
    Sizes,
    all_but_every_nth,
    read_biases,
    read_optional_window,
    read_window,
)

MAX_EXPERTS = 1024


# --- readers shared by several families ------------------------------------------------------


def read_expert_counts(
    config: ConfigFile, *names: str, per_token_name: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """Read the number of experts per layer, and per token.

    Args:
        names: fields that may have the number of experts per layer; the first that is present
            counts.
        per_token_name: name of the field with the number of experts per token.
    """
    config.choice("hidden_act", ("silu", "swish"), "silu")
    name = next((name for name in names if name in config), names[0])
    count = config.integer(name, high=MAX_EXPERTS)
    top_k = config.integer(per_token_name, high=MAX_EXPERTS)
    if top_k > count:
        raise config.invalid_field(per_token_name, f"at most {name}={count}")
    return count, top_k


def read_sparse_layers(config: ConfigFile, sizes: Sizes) -> tuple[bool, ...]:
    """Read which of Qwen's layers have experts: every ``decoder_sparse_step``-th layer, except
    those in ``mlp_only_layers``."""
    step = config.integer("decoder_sparse_step", 1)
    accepted = f"a list of layers from 0 to {sizes.num_layers - 1}"

    def is_layer_index(layer: Any) -> bool:
        return type(layer) is int and 0 <= layer < sizes.num_layers

    named = "mlp_only_layers" in config
    dense = config.entries("mlp_only_layers", accepted, is_layer_index) if named else []
    return tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(sizes.num_layers)
    )


def _read_groups(config: ConfigFile, count: int, top_k: int) -> tuple[int, int]:
    """Read ``n_group`` and ``topk_group``. The chosen groups must have at least ``top_k`` experts
    together."""
    groups = config.integer("n_group", 1, high=count)
    if count % groups or (groups > 1 and count // groups < 2):
        raise config.invalid_field(
            "n_group", f"a divisor of n_routed_experts={count}, at most half of it"
        )
    chosen, least = config.integer("topk_group", 1), -(-top_k // (count // groups))
    if not least <= chosen <= groups:
        raise config.invalid_field(
            "topk_group",
            f"{least} to n_group={groups} groups of {count // groups} experts, for "
            f"num_experts_per_tok={top_k}",
        )
    return groups, chosen


def read_routing(config: ConfigFile, *names: str) -> RoutingConfig:
    count, top_k = read_expert_counts(config, *names)
    return RoutingConfig(count, top_k, renormalise=config.boolean("norm_topk_prob", False))


def read_gated_experts(
    config: ConfigFile, layers: tuple[bool, ...], routing: RoutingConfig
) -> Fields:
    """Read Qwen's experts, which include a shared expert with a gate."""
    experts = ExpertsConfig(
        layers,
        routing,
        config.integer("moe_intermediate_size"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        names=ExpertsNames(shared="mlp.shared_expert"),
    )
    return {"experts": experts}


def _read_deepseek_v3_experts(config: ConfigFile, sizes: Sizes) -> Fields:
    """Read experts with DeepSeek-V3's routing, in all but the first ``first_k_dense_replace``
    layers. It has sigmoid scores, groups and a correction bias (arXiv 2412.19437, section 2.1.2).
    """
    count, top_k = read_expert_counts(config, "n_routed_experts", "num_local_experts")
    groups, chosen = _read_groups(config, count, top_k)
    first = config.integer("first_k_dense_replace", low=0)
    routing = RoutingConfig(
        count,
        top_k,
        scoring="sigmoid",
        renormalise=config.boolean("norm_topk_prob", False),
        least_sum=1e-20,
        scale=config.number("routed_scaling_factor", 1.0, high=1e3, open_low=True),
        num_groups=groups,
        top_groups=chosen,
        correction=True,
        float32=True,
    )
    size = config.integer("moe_intermediate_size")
    shared = size * config.integer("n_shared_experts", high=MAX_EXPERTS)
    layers = tuple(layer >= first for layer in range(sizes.num_layers))
    unused = config.integer("num_nextn_predict_layers", 0, low=0, high=1024)
    return {
        "experts": ExpertsConfig(layers, routing, size, shared_size=shared),
        "num_unused_layers": unused,
    }


# --- one reader per family -------------------------------------------------------------------


def _read_mixtral(config: ConfigFile, sizes: Sizes) -> Fields:
    count, top_k = read_expert_counts(config, "num_local_experts", "num_experts")
    experts = ExpertsConfig(
        (True,) * sizes.num_layers,
        RoutingConfig(count, top_k, renormalise=True),
        config.integer("intermediate_size"),
        names=ExpertsNames(
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            parts=("w1", "w3", "w2"),
        ),
    )
    return {**FAMILIES["mistral"].read(config, sizes), "experts": experts}


def _read_qwen2_moe(config: ConfigFile, sizes: Sizes) -> Fields:
    # Every second layer below max_window_layers has the sliding window. In dense Qwen2, all layers
    # from max_window_layers on have it.
    most = config.integer("max_window_layers", 28, low=0)
    is_sliding = "sliding_window" in config
    layers = tuple(
        is_sliding and layer % 2 == 0 and layer < most for layer in range(sizes.num_layers)
    )
    window = read_optional_window(config, sizes, layers)
    routing = read_routing(config, "num_experts")
    experts = read_gated_experts(config, read_sparse_layers(config, sizes), routing)
    return {"attention_bias": config.boolean("qkv_bias", True), **window, **experts}


def _read_qwen3_moe(config: ConfigFile, sizes: Sizes) -> Fields:
    experts = ExpertsConfig(
        read_sparse_layers(config, sizes),
        read_routing(config, "num_experts", "num_local_experts"),
        config.integer("moe_intermediate_size"),
    )
    is_sliding = "sliding_window" in config
    window = read_optional_window(config, sizes, (is_sliding,) * sizes.num_layers)
    return {"qk_norm": True, **read_biases(config), **window, "experts": experts}


def _read_olmoe(config: ConfigFile, sizes: Sizes) -> Fields:
    if "clip_qkv" in config:
        raise config.invalid_field("clip_qkv", "null: projections are not clipped")
    experts = ExpertsConfig(
        (True,) * sizes.num_layers,
        read_routing(config, "num_experts", "num_local_experts"),
        config.integer("intermediate_size"),
    )
    norms = {"qk_norm": True, "norms_whole_projections": True}
    return {**norms, **read_biases(config), "experts": experts}


def _read_dots1(config: ConfigFile, sizes: Sizes) -> Fields:
    first = config.integer("max_window_layers", 62, low=0)
    is_sliding = "sliding_window" in config
    layers = tuple(is_sliding and layer >= first for layer in range(sizes.num_layers))
    window = read_window(config, layers)
    fields = {"qk_norm": True, **read_biases(config), **window}
    return {**fields, **_read_deepseek_v3_experts(config, sizes)}


def _read_glm4_moe(config: ConfigFile, sizes: Sizes) -> Fields:
    fields = {"qk_norm": config.boolean("use_qk_norm", False)}
    fields["attention_bias"] = config.boolean("attention_bias", False)
    return {**fields, **_read_deepseek_v3_experts(config, sizes)}


def _read_ernie4_5_moe(config: ConfigFile, sizes: Sizes) -> Fields:
    if config.boolean("use_bias", False):
        raise config.invalid_field("use_bias", "false: the output head has none")
    count, top_k = read_expert_counts(config, "moe_num_experts", per_token_name="moe_k")
    step = config.integer("moe_layer_interval", 1)
    first = config.integer("moe_layer_start_index", 1, low=0)
    last = config.integer("moe_layer_end_index", -1, low=-1)
    last = sizes.num_layers - 1 if last == -1 else last
    layers = tuple(
        (layer + 1) % step == 0 and first <= layer <= last for layer in range(sizes.num_layers)
    )
    routing = RoutingConfig(
        count,
        top_k,
        renormalise=True,
        least_sum=config.number("moe_norm_min", 1e-12, high=1.0),
        correction=True,
        correction_rows=1,
        float32=True,
    )
    size = config.integer("moe_intermediate_size")
    shared = size * config.integer("moe_num_shared_experts", 2, low=0, high=MAX_EXPERTS)
    names = ExpertsNames(correction="mlp.moe_statics.e_score_correction_bias")
    experts = ExpertsConfig(layers, routing, size, shared_size=shared, names=names)
    unused = config.integer("num_nextn_predict_layers", 0, low=0, high=1024)
    return {"interleaved_rope": True, "experts": experts, "num_unused_layers": unused}


def _read_gpt_oss(config: ConfigFile, sizes: Sizes) -> Fields:
    count, top_k = read_expert_counts(config, "num_local_experts", "num_experts")
    limits = {"high": 1e6, "open_low": True}
    experts = ExpertsConfig(
        (True,) * sizes.num_layers,
        # gpt-oss applies the softmax to the chosen experts' logits alone. A softmax over all
        # experts, renormalised over the chosen ones, is the same.
        RoutingConfig(count, top_k, renormalise=True, bias=True),
        config.integer("intermediate_size"),
        ActivationConfig(
            limit=config.number("swiglu_limit", 7.0, **limits),
            alpha=config.number("swiglu_alpha", 1.702, **limits),
        ),
        bias=True,
        names=ExpertsNames(
            router="mlp.router", experts=None, fused_router="mlp.router", transposed=True
        ),
    )
    bias = config.boolean("attention_bias", True)
    window = read_window(config, all_but_every_nth(2, sizes))
    biases = {"attention_bias": bias, "output_bias": bias}
    return {"sinks": True, **biases, **window, "experts": experts}


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

MOE_FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        (2,),
        read=_read_mixtral,
    ),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", {"sliding_window": 4096}, read=_read_qwen2_moe),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"sliding_window": 4096}, read=_read_qwen3_moe),
    "olmoe": Family(
        "OlmoeForCausalLM", MULTI_HEAD | {"rms_norm_eps": 1e-5}, (50_279,), read=_read_olmoe
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        MULTI_HEAD | {"sliding_window": 4096, "first_k_dense_replace": 0},
        read=_read_dots1,
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
        read=_read_glm4_moe,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0},
        (2,),
        read=_read_ernie4_5_moe,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rope_parameters": _GPT_OSS_ROPE,
        },
        read=_read_gpt_oss,
    ),
}
"""Families by ``model_type``."""
