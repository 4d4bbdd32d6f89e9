"""HYBRID_FAMILIES: architectures that mix gated-delta-rule and attention layers, as data."""

from __future__ import annotations

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.experts_config import RoutingConfig
from asyncllm.checkpoint.families import (
    FULL,
    Family,
    Fields,
    Sizes,
    all_but_every_nth,
    read_biases,
    read_layer_types,
)
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.checkpoint.moe_families import (
    read_expert_counts,
    read_gated_experts,
    read_routing,
    read_sparse_layers,
)

LINEAR = "linear_attention"

MAX_HEADS, MAX_HEAD_DIM, MAX_CONV_WIDTH = 1024, 1024, 16


def _read_linear_layers(config: ConfigFile, sizes: Sizes) -> tuple[bool, ...]:
    """Read which layers have linear attention: those that ``layer_types`` names; without that
    field, all but every ``full_attention_interval``-th."""
    count = sizes.num_layers
    if "layer_types" not in config:
        interval = config.integer("full_attention_interval", 4)
        if interval > count:
            accepted = f"at most num_hidden_layers={count} (4 without it): some layer has attention"
            raise config.invalid_field("full_attention_interval", accepted)
        return all_but_every_nth(interval, sizes)
    kinds = read_layer_types(config, count, LINEAR)
    if FULL not in kinds:
        raise config.invalid_field("layer_types", f"a list of {FULL}, at least once, and {LINEAR}")
    return tuple(kind == LINEAR for kind in kinds)


def _read_gated_delta(
    config: ConfigFile, sizes: Sizes, *, grouped_by_key_head: bool = False
) -> Fields:
    """Read the fields of a model with gated-delta-rule layers and gated attention."""
    config.choice("hidden_act", ("silu", "swish"), "silu")
    if not config.boolean("attn_output_gate", True):
        raise config.invalid_field("attn_output_gate", "true: attention has a gate on its output")
    key_heads = config.integer("linear_num_key_heads", high=MAX_HEADS)
    value_heads = config.integer("linear_num_value_heads", high=MAX_HEADS)
    if value_heads % key_heads:
        accepted = f"a multiple of linear_num_key_heads={key_heads}"
        raise config.invalid_field("linear_num_value_heads", accepted)
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


def _read_qwen3_5_moe(config: ConfigFile, sizes: Sizes) -> Fields:
    routing = RoutingConfig(*read_expert_counts(config, "num_experts"), renormalise=True)
    experts = read_gated_experts(config, (True,) * sizes.num_layers, routing)
    # No layer has an ordinary MLP, so the file has no ``intermediate_size``.
    dense = {"intermediate_size": config.integer("moe_intermediate_size")}
    return {**_read_gated_delta(config, sizes), **experts, **dense}


def _read_qwen3_next(config: ConfigFile, sizes: Sizes) -> Fields:
    routing = read_routing(config, "num_experts")
    experts = read_gated_experts(config, read_sparse_layers(config, sizes), routing)
    return {**_read_gated_delta(config, sizes, grouped_by_key_head=True), **experts}


_GATED_DELTA: Fields = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

HYBRID_FAMILIES: dict[str, Family] = {
    # Qwen3.5's multimodal RoPE has a time, a height and a width position. Text tokens have the
    # same value for all three, so plain RoPE computes the same.
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _GATED_DELTA,
        partial_rotary_factor=0.25,
        text_part=True,
        read=_read_gated_delta,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _GATED_DELTA,
        partial_rotary_factor=0.25,
        text_part=True,
        read=_read_qwen3_5_moe,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _GATED_DELTA | {"norm_topk_prob": True},
        partial_rotary_factor=0.25,
        read=_read_qwen3_next,
    ),
}
"""Families by ``model_type``."""
