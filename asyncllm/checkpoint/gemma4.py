"""GEMMA4: the Gemma 4 family, whose layers differ in heads, KV and MLP size."""

from __future__ import annotations

from dataclasses import replace

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.experts_config import (
    ActivationConfig,
    ExpertsConfig,
    ExpertsNames,
    RoutingConfig,
)
from asyncllm.checkpoint.families import (
    FULL,
    NORMS_AROUND,
    SLIDING,
    Family,
    Fields,
    Sizes,
    all_but_every_nth,
    read_biases,
    read_window,
)
from asyncllm.checkpoint.layer_config import (
    LayerConfig,
    LayerInputConfig,
    apply_head_overrides,
    share_kv,
)
from asyncllm.checkpoint.moe_families import MAX_EXPERTS
from asyncllm.checkpoint.rope_config import ROPE_PARAMETERS, RopeConfig, RopeKind, read_rope_section


def _read_gemma4(config: ConfigFile, sizes: Sizes) -> Fields:
    """Read the fields of Gemma 4, dense or with experts beside the MLP of every layer."""
    if config.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise config.invalid_field(
            "use_bidirectional_attention", "null, or 'vision' for images alone"
        )
    window = read_window(config, all_but_every_nth(6, sizes))
    # As in transformers, the last layer has full attention even if the file says sliding.
    is_sliding = (*window["sliding_layers"][:-1], False)
    kinds = tuple(SLIDING if each else FULL for each in is_sliding)
    ropes = {kind: _read_rope(config, sizes, kind) for kind in sorted(set(kinds))}
    fields = {
        **read_biases(config),
        "qk_norm": True,
        "value_norm": True,
        "float32_norm_weights": True,
        "layer_scalar": True,
        "attention_scale": 1.0,
        "embedding_multiplier": sizes.hidden_size**0.5,
        "rounds_embedding_multiplier": True,
        "logits_softcap": config.number("final_logit_softcapping", None, open_low=True),
        "sliding_window": window["sliding_window"] if any(is_sliding) else None,
        "sliding_layers": is_sliding,
        "layers": share_kv(config, _read_layers(config, is_sliding), kinds),
        "layer_ropes": tuple(ropes[kind] for kind in kinds),
    }
    if size := config.integer("hidden_size_per_layer_input", low=0):
        rows = config.integer("vocab_size_per_layer_input", low=config.integer("vocab_size"))
        fields["layer_input"] = LayerInputConfig(size, rows)
    if config.boolean("enable_moe_block", False):
        fields["experts"] = _read_experts(config, sizes)
    return fields


def _read_layers(config: ConfigFile, is_sliding: tuple[bool, ...]) -> list[LayerConfig]:
    """Read the sizes of each layer. Full-attention layers have another number and size of heads
    than sliding ones: files of transformers 5.20 and later list them per layer, earlier files once
    for all.
    """
    shared = config.boolean("attention_k_eq_v", False)
    near = LayerConfig(
        config.integer("num_key_value_heads"),
        config.integer("head_dim"),
        config.integer("intermediate_size"),
    )
    full = replace(near, value_is_key=shared)
    if "per_layer_config" not in config:
        heads = config.integer("num_global_key_value_heads", near.num_kv_heads)
        full = replace(
            full,
            num_kv_heads=heads if shared else near.num_kv_heads,
            head_dim=config.integer("global_head_dim", 512),
        )
    return apply_head_overrides(config, [near if each else full for each in is_sliding])


def _read_rope(config: ConfigFile, sizes: Sizes, kind: str) -> RopeConfig:
    named = (
        config.section(ROPE_PARAMETERS)
        if ROPE_PARAMETERS in config
        else ConfigFile(config.path, _ROPES)
    )
    section = named.section(kind)
    section.choice("rope_type", ("default", "proportional"))
    theta = section.number("rope_theta", open_low=True)
    aliases: dict[str, RopeKind] = {"proportional": "proportional"}
    return read_rope_section(section, config, theta, sizes.rotary_dim, aliases)


def _read_experts(config: ConfigFile, sizes: Sizes) -> ExpertsConfig:
    count = config.integer("num_experts", high=MAX_EXPERTS)
    top_k = config.integer("top_k_experts", high=MAX_EXPERTS)
    if top_k > count:
        raise config.invalid_field("top_k_experts", f"at most num_experts={count}")
    return ExpertsConfig(
        (True,) * sizes.num_layers,
        RoutingConfig(count, top_k, renormalise=True, expert_scale=True),
        config.integer("moe_intermediate_size"),
        ActivationConfig(gelu=True),
        parallel_to_mlp=True,
        names=ExpertsNames(
            router="router.proj", experts=None, fused="experts", fused_router="router.proj"
        ),
    )


_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_DEFAULTS = {
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

GEMMA4: dict[str, Family] = {
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        _DEFAULTS,
        (1,),
        names=NORMS_AROUND,
        activation="hidden_activation",
        text_part=True,
        read=_read_gemma4,
    ),
}
"""Families by ``model_type``."""
