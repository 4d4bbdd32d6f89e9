"""FAMILIES: the dense architectures of the engine's own decoder, as data.

Each entry has transformers' defaults for absent fields, the names of a layer's tensors, and a
function that converts the family's fields to those of ModelConfig. The decoder reads only
ModelConfig, never the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.rope_config import (
    MAX_POSITIONS,
    NO_ROPE,
    RopeConfig,
    read_layer_ropes,
    read_rope,
    rope_section,
)

FULL, SLIDING = "full_attention", "sliding_attention"

Fields = dict[str, Any]
"""Fields of a ModelConfig, by name."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a layer's tensors in a checkpoint.

    Attributes:
        input_norm, post_norm: norms before attention and before the MLP; None for no norm.
        mixer_norm, mlp_norm: norms after attention and after the MLP, before the residual is added.
        qkv: the projections q, k and v, or one fused projection with the rows of all three.
        mlp: module that contains the MLP's projections.
        gate_up: the gate and up projections, or one fused projection with the rows of both.
        down: the down projection.
    """

    input_norm: str | None = "input_layernorm"
    post_norm: str | None = "post_attention_layernorm"
    mixer_norm: str | None = None
    mlp_norm: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


PRE_NORMS = TensorNames()
"""Tensor names of a layer with norms before attention and MLP, as in Llama."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model that a family's ``read`` function needs.

    Attributes:
        rotary_dim: number of elements of a head that RoPE rotates.
    """

    num_layers: int
    hidden_size: int
    head_dim: int
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of the engine's own decoder.

    Attributes:
        architecture: transformers' class, as in the field ``architectures``.
        defaults: transformers' defaults of fields that a file may leave out.
        eos_token_ids: ids to use if neither config.json nor generation_config.json has any.
        names: names of a layer's tensors.
        activation: name of the field with the MLP's activation.
        partial_rotary_factor: default of config.json's field of this name; None if it must be 1.
        text_part: whether the entry also applies to the text model of multimodal checkpoints.
        is_supported: function that returns whether the decoder supports a file's model; None if it
            supports every model of the family.
        read: function that reads further fields of ModelConfig from a file.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    names: TensorNames = PRE_NORMS
    activation: str = "hidden_act"
    partial_rotary_factor: float | None = None
    text_part: bool = False
    is_supported: Callable[[ConfigFile], bool] | None = None
    read: Callable[[ConfigFile, Sizes], Fields] = lambda config, sizes: {}


# --- readers shared by several families ------------------------------------------------------


def read_biases(config: ConfigFile, default: bool = False) -> Fields:
    """Read ``attention_bias``, which applies to the projections q, k, v and o."""
    bias = config.boolean("attention_bias", default)
    return {"attention_bias": bias, "output_bias": bias}


def read_window(config: ConfigFile, layers: tuple[bool, ...]) -> Fields:
    """Read the sliding window and the layers that have it.

    Args:
        layers: per layer, whether it has the window if ``layer_types`` is absent.
    """
    layers = _read_sliding_layers(config, layers)
    window = config.integer("sliding_window", None, high=MAX_POSITIONS)
    if any(layers) and window is None:
        raise config.invalid_field("layer_types", f"{FULL} alone where no sliding window is in use")
    return {"sliding_window": window if any(layers) else None, "sliding_layers": layers}


def read_nullable_window(config: ConfigFile, layers: tuple[bool, ...]) -> Fields:
    """Read the sliding window like ``read_window``; null means that no layer has a window."""
    is_sliding = "sliding_window" in config
    return read_window(config, tuple(is_sliding and each for each in layers))


def read_optional_window(config: ConfigFile, sizes: Sizes, layers: tuple[bool, ...]) -> Fields:
    """Read the sliding window if ``use_sliding_window`` is true; otherwise no layer has a
    window.

    Args:
        layers: per layer, whether it has the window if ``layer_types`` is absent and
            ``sliding_window`` is not null.
    """
    if config.boolean("use_sliding_window", False):
        return read_nullable_window(config, layers)
    file = ConfigFile(config.path, {**config.values, "sliding_window": None})
    return read_window(file, (False,) * sizes.num_layers)


def _read_uniform_window(config: ConfigFile, sizes: Sizes) -> Fields:
    """Read ``sliding_window``, which all layers have; null means that no layer has a window."""
    window = config.integer("sliding_window", None, high=MAX_POSITIONS)
    implied = (window is not None,) * sizes.num_layers
    if _read_sliding_layers(config, implied) != implied:
        kind = FULL if window is None else SLIDING
        raise config.invalid_field(
            "layer_types", f"{kind!r} alone, as sliding_window={window} implies"
        )
    return {"sliding_window": window, "sliding_layers": implied}


def _read_sliding_layers(config: ConfigFile, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Read from ``layer_types`` whether each layer has a sliding window; ``default`` if absent."""
    if "layer_types" not in config:
        return default
    return tuple(kind == SLIDING for kind in read_layer_types(config, len(default), SLIDING))


def read_layer_types(config: ConfigFile, count: int, kind: str) -> list[str]:
    """Read ``layer_types``, a list in which each layer is either full attention or ``kind``."""
    accepted = f"a list of num_hidden_layers={count} names, {FULL} or {kind}"
    return config.entries("layer_types", accepted, (FULL, kind).__contains__, count)


def all_but_every_nth(count: int, sizes: Sizes) -> tuple[bool, ...]:
    """Make one bool per layer: False for every ``count``-th layer, True for the others."""
    return tuple((index + 1) % count != 0 for index in range(sizes.num_layers))


def layers_from(first: int, sizes: Sizes) -> tuple[bool, ...]:
    """Make one bool per layer: True from layer ``first`` on."""
    return tuple(index >= first for index in range(sizes.num_layers))


# --- readers of configurations, one for each model family ------------------------------------


def _read_llama(config: ConfigFile, sizes: Sizes) -> Fields:
    return {**read_biases(config), "mlp_bias": config.boolean("mlp_bias", False)}


def _read_qwen(config: ConfigFile, sizes: Sizes) -> Fields:
    first = config.integer("max_window_layers", 28, low=0)
    return read_optional_window(config, sizes, layers_from(first, sizes))


def _read_qwen2(config: ConfigFile, sizes: Sizes) -> Fields:
    return {"attention_bias": True, **_read_qwen(config, sizes)}


def _read_qwen3(config: ConfigFile, sizes: Sizes) -> Fields:
    return {"qk_norm": True, **read_biases(config), **_read_qwen(config, sizes)}


def _read_ministral3(config: ConfigFile, sizes: Sizes) -> Fields:
    section = rope_section(config)
    if not section.values:
        raise config.invalid_field("rope_parameters", "a JSON object, with llama_4_scaling_beta")
    rope = read_rope(config, sizes.rotary_dim)
    beta = section.number("llama_4_scaling_beta", 0.0)
    if beta:
        original = section.integer("original_max_position_embeddings", high=MAX_POSITIONS)
        rope = replace(rope, query_scale_beta=beta, original_max_position=original)
    return {"rope": rope, **_read_uniform_window(config, sizes)}


def _read_smollm3(config: ConfigFile, sizes: Sizes) -> Fields:
    interval = config.integer("no_rope_layer_interval", 4)
    has_rope = all_but_every_nth(interval, sizes)
    if "no_rope_layers" in config:
        accepted = f"a list of num_hidden_layers={sizes.num_layers} numbers, 0 for no RoPE"
        flags = config.entries("no_rope_layers", accepted, (0, 1).__contains__)
        if len(flags) < sizes.num_layers:
            raise config.invalid_field("no_rope_layers", accepted)
        has_rope = tuple(map(bool, flags[: sizes.num_layers]))
    window = read_optional_window(config, sizes, tuple(not each for each in has_rope))
    return {**_read_llama(config, sizes), **window, **_read_optional_ropes(config, sizes, has_rope)}


def _read_optional_ropes(config: ConfigFile, sizes: Sizes, has_rope: tuple[bool, ...]) -> Fields:
    """Read the RoPE that some layers have; the other layers have none."""
    rope = read_rope(config, sizes.rotary_dim)
    return {"layer_ropes": tuple(rope if each else NO_ROPE for each in has_rope)}


def _ropes_by_layer(ropes: Mapping[str, RopeConfig], sliding: tuple[bool, ...]) -> Fields:
    """Choose each layer's RoPE: that of sliding layers or that of full-attention layers."""
    return {"layer_ropes": tuple(ropes[SLIDING if each else FULL] for each in sliding)}


def _read_olmo2(config: ConfigFile, sizes: Sizes) -> Fields:
    return {
        "qk_norm": True,
        "norms_whole_projections": True,
        "float32_norm_weights": True,
        **read_biases(config),
    }


def _read_olmo3(config: ConfigFile, sizes: Sizes) -> Fields:
    window = read_window(config, all_but_every_nth(4, sizes))
    theta = config.number("rope_theta", 500_000.0, open_low=True)
    ropes = read_layer_ropes(config, sizes.rotary_dim, {FULL: theta, SLIDING: theta})
    return {
        **_read_olmo2(config, sizes),
        **window,
        **_ropes_by_layer(ropes, window["sliding_layers"]),
    }


def _read_phi3(config: ConfigFile, sizes: Sizes) -> Fields:
    # The first Phi-3 checkpoints call the RoPE kind longrope "su" or "yarn".
    rope = read_rope(config, sizes.rotary_dim, {"su": "longrope", "yarn": "longrope"})
    return {"rope": rope, **_read_uniform_window(config, sizes)}


def _read_granite(config: ConfigFile, sizes: Sizes) -> Fields:
    return {
        **_read_llama(config, sizes),
        "embedding_multiplier": config.number("embedding_multiplier", 1.0, open_low=True),
        "residual_multiplier": config.number("residual_multiplier", 1.0, open_low=True),
        "attention_scale": config.number("attention_multiplier", 1.0, open_low=True),
        "logits_divisor": config.number("logits_scaling", 1.0, open_low=True),
    }


def _is_dense_granite4(config: ConfigFile) -> bool:
    """Whether a Granite 4 model has no experts, and attention in every layer."""
    kinds = config.values.get("layer_types")
    attends = isinstance(kinds, list) and all(each in ("attention", FULL) for each in kinds)
    return attends and config.values.get("num_local_experts") == 0


def _read_granite4(config: ConfigFile, sizes: Sizes) -> Fields:
    fields = _read_granite(config, sizes)
    fields |= {"mlp_bias": False, "intermediate_size": config.integer("shared_intermediate_size")}
    has_rope = config.choice("position_embedding_type", ("rope",), None) is not None
    return {**fields, **_read_optional_ropes(config, sizes, (has_rope,) * sizes.num_layers)}


def _read_glm4(config: ConfigFile, sizes: Sizes) -> Fields:
    bias = config.boolean("attention_bias", True)
    return {"attention_bias": bias, "interleaved_rope": True}


def _read_gemma(config: ConfigFile, sizes: Sizes) -> Fields:
    """Read the fields that Gemma 2 and 3 have in common.

    Their norms multiply by ``1 + weight`` in float32, and their embeddings are scaled.
    """
    if config.values.get("use_bidirectional_attention"):
        raise config.invalid_field("use_bidirectional_attention", "false: a decoder")
    return {
        **read_biases(config),
        "norm_offset": 1.0,
        "float32_norm_weights": True,
        "embedding_multiplier": sizes.hidden_size**0.5,
        "rounds_embedding_multiplier": True,
        "attention_scale": config.number("query_pre_attn_scalar", 256, open_low=True) ** -0.5,
        "logits_softcap": config.number("final_logit_softcapping", None, open_low=True),
    }


def _read_gemma2(config: ConfigFile, sizes: Sizes) -> Fields:
    softcap = config.number("attn_logit_softcapping", None, open_low=True)
    window = read_window(config, all_but_every_nth(2, sizes))
    return {**_read_gemma(config, sizes), **window, "attention_softcap": softcap}


def _read_gemma3(config: ConfigFile, sizes: Sizes) -> Fields:
    if "attn_logit_softcapping" in config:
        raise config.invalid_field("attn_logit_softcapping", "null: Gemma 3 does not cap scores")
    window = read_window(
        config, all_but_every_nth(config.integer("sliding_window_pattern", 6), sizes)
    )
    default_thetas = {
        FULL: config.number("rope_theta", 1e6, open_low=True),
        SLIDING: config.number("rope_local_base_freq", 1e4, open_low=True),
    }
    ropes = read_layer_ropes(config, sizes.rotary_dim, default_thetas)
    layers = _ropes_by_layer(ropes, window["sliding_layers"])
    return {**_read_gemma(config, sizes), "qk_norm": True, **window, **layers}


SANDWICH_NORMS = TensorNames(
    post_norm="pre_feedforward_layernorm",
    mixer_norm="post_attention_layernorm",
    mlp_norm="post_feedforward_layernorm",
)
POST_NORMS = replace(SANDWICH_NORMS, input_norm=None, post_norm=None)
FUSED_TENSOR_NAMES = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
SHARED_MLP_TENSOR_NAMES = TensorNames(
    mlp="shared_mlp", gate_up=("input_linear",), down="output_linear"
)
GLM4_TENSOR_NAMES = TensorNames(
    mixer_norm="post_self_attn_layernorm",
    mlp_norm="post_mlp_layernorm",
    gate_up=("gate_up_proj",),
)

MULTI_HEAD = {"num_key_value_heads": None}
"""Default for families that have as many key/value heads as query heads."""

_GEMMA: Fields = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **_GEMMA}
# Multimodal checkpoints leave out fields whose value is transformers' default, even sizes.
_GEMMA3 = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    **_GEMMA,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", MULTI_HEAD, (2,), read=_read_llama),
    "mistral": Family(
        "MistralForCausalLM", {"sliding_window": 4096}, (2,), read=_read_uniform_window
    ),
    "qwen2": Family("Qwen2ForCausalLM", {"sliding_window": 4096}, read=_read_qwen2),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"sliding_window": 4096, "head_dim": 128}, read=_read_qwen3
    ),
    # Qwen3-VL's multimodal RoPE has a time, a height and a width position. Text tokens have the
    # same value for all three, so plain RoPE computes the same.
    "qwen3_vl_text": Family(
        "Qwen3ForCausalLM",
        {"sliding_window": 4096, "head_dim": 128, "rope_theta": 500_000.0},
        text_part=True,
        read=_read_qwen3,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {"head_dim": 128, "rms_norm_eps": 1e-5},
        (2,),
        text_part=True,
        read=_read_ministral3,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
        (128_001,),
        read=_read_smollm3,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        MULTI_HEAD | {"rms_norm_eps": 1e-5},
        (50_279,),
        names=POST_NORMS,
        read=_read_olmo2,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        MULTI_HEAD | {"rms_norm_eps": 1e-5, "sliding_window": 4096},
        (50_279,),
        names=POST_NORMS,
        read=_read_olmo3,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        MULTI_HEAD | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        (32_000,),
        names=FUSED_TENSOR_NAMES,
        partial_rotary_factor=1.0,
        read=_read_phi3,
    ),
    "granite": Family("GraniteForCausalLM", MULTI_HEAD, (2,), read=_read_granite),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        MULTI_HEAD | {"shared_intermediate_size": 1024},
        (2,),
        names=SHARED_MLP_TENSOR_NAMES,
        is_supported=_is_dense_granite4,
        read=_read_granite4,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {"head_dim": 128, "rms_norm_eps": 1.5625e-7},
        (151_329, 151_336, 151_338),
        names=GLM4_TENSOR_NAMES,
        partial_rotary_factor=0.5,
        read=_read_glm4,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA2,
        (1,),
        names=SANDWICH_NORMS,
        activation="hidden_activation",
        read=_read_gemma2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA3,
        (1,),
        names=SANDWICH_NORMS,
        activation="hidden_activation",
        text_part=True,
        read=_read_gemma3,
    ),
}
"""Families by ``model_type``."""
