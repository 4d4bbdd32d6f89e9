"""FAMILIES: table of the dense architectures that the engine's own decoder supports.

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
    rope_parameters_section,
)

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

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


PRE_NORM_TENSOR_NAMES = TensorNames()
"""Tensor names of a layer with norms before attention and MLP, as in Llama."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Model sizes that a family's ``read_fields`` function needs.

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
        tensor_names: names of a layer's tensors.
        activation_field: name of the field with the MLP's activation.
        partial_rotary_factor: default of config.json's field of this name; None if it must be 1.
        can_be_text_part: whether the entry also applies to text models of multimodal checkpoints.
        is_supported: function that returns whether the decoder supports a file's model; None if it
            supports every model of the family.
        read_fields: function that reads further fields of ModelConfig from a file.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    tensor_names: TensorNames = PRE_NORM_TENSOR_NAMES
    activation_field: str = "hidden_act"
    partial_rotary_factor: float | None = None
    can_be_text_part: bool = False
    is_supported: Callable[[ConfigFile], bool] | None = None
    read_fields: Callable[[ConfigFile, ModelSizes], Fields] = lambda config, sizes: {}


# --- readers shared by several families ------------------------------------------------------


def read_biases(config: ConfigFile, default: bool = False) -> Fields:
    """Read ``attention_bias``, which applies to the projections q, k, v and o."""
    bias = config.boolean("attention_bias", default)
    return {"attention_bias": bias, "output_bias": bias}


def read_window(config: ConfigFile, default_sliding_layers: tuple[bool, ...]) -> Fields:
    """Read the sliding window and the layers that have it.

    Args:
        default_sliding_layers: per layer, whether it has the window if ``layer_types`` is
            absent.
    """
    layers = _read_sliding_layers(config, default_sliding_layers)
    window = config.integer("sliding_window", None, high=MAX_POSITIONS)
    if any(layers) and window is None:
        raise config.field_error(
            "layer_types", f"{FULL_ATTENTION} alone where no sliding window is in use"
        )
    return {"sliding_window": window if any(layers) else None, "sliding_layers": layers}


def read_nullable_window(config: ConfigFile, default_sliding_layers: tuple[bool, ...]) -> Fields:
    """Read the sliding window like ``read_window``; null means that no layer has a window."""
    is_sliding = "sliding_window" in config
    return read_window(config, tuple(is_sliding and each for each in default_sliding_layers))


def read_optional_window(
    config: ConfigFile, sizes: ModelSizes, default_sliding_layers: tuple[bool, ...]
) -> Fields:
    """Read the sliding window if ``use_sliding_window`` is true; else no layer has a window.

    Args:
        default_sliding_layers: per layer, whether it has the window if ``layer_types`` is
            absent and ``sliding_window`` is not null.
    """
    if config.boolean("use_sliding_window", False):
        return read_nullable_window(config, default_sliding_layers)
    file = ConfigFile(config.path, {**config.values, "sliding_window": None})
    return read_window(file, (False,) * sizes.num_layers)


def _read_uniform_window(config: ConfigFile, sizes: ModelSizes) -> Fields:
    """Read ``sliding_window``, which all layers have; null means that no layer has a window."""
    window = config.integer("sliding_window", None, high=MAX_POSITIONS)
    implied = (window is not None,) * sizes.num_layers
    if _read_sliding_layers(config, implied) != implied:
        kind = FULL_ATTENTION if window is None else SLIDING_ATTENTION
        raise config.field_error(
            "layer_types", f"{kind!r} alone, as sliding_window={window} implies"
        )
    return {"sliding_window": window, "sliding_layers": implied}


def _read_sliding_layers(config: ConfigFile, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Read from ``layer_types`` whether each layer has a sliding window; ``default`` if absent."""
    if "layer_types" not in config:
        return default
    return tuple(
        kind == SLIDING_ATTENTION
        for kind in read_layer_types(config, len(default), SLIDING_ATTENTION)
    )


def read_layer_types(config: ConfigFile, num_layers: int, non_full_type: str) -> list[str]:
    """Read ``layer_types``, in which each layer is either full attention or ``non_full_type``."""
    accepted = (
        f"a list of num_hidden_layers={num_layers} names, {FULL_ATTENTION} or {non_full_type}"
    )
    return config.checked_list(
        "layer_types", accepted, (FULL_ATTENTION, non_full_type).__contains__, num_layers
    )


def layer_mask_except_every_nth(interval: int, num_layers: int) -> tuple[bool, ...]:
    """Make one bool per layer: False for every ``interval``-th layer, True for the others."""
    return tuple((index + 1) % interval != 0 for index in range(num_layers))


def layer_mask_from(first_layer: int, num_layers: int) -> tuple[bool, ...]:
    """Make one bool per layer: True from ``first_layer`` on."""
    return tuple(index >= first_layer for index in range(num_layers))


# --- readers of configurations, one for each model family ------------------------------------


def _read_llama(config: ConfigFile, sizes: ModelSizes) -> Fields:
    return {**read_biases(config), "mlp_bias": config.boolean("mlp_bias", False)}


def _read_qwen(config: ConfigFile, sizes: ModelSizes) -> Fields:
    first = config.integer("max_window_layers", 28, low=0)
    return read_optional_window(config, sizes, layer_mask_from(first, sizes.num_layers))


def _read_qwen2(config: ConfigFile, sizes: ModelSizes) -> Fields:
    return {"attention_bias": True, **_read_qwen(config, sizes)}


def _read_qwen3(config: ConfigFile, sizes: ModelSizes) -> Fields:
    return {"qk_norm": True, **read_biases(config), **_read_qwen(config, sizes)}


def _read_ministral3(config: ConfigFile, sizes: ModelSizes) -> Fields:
    section = rope_parameters_section(config)
    if not section.values:
        raise config.field_error("rope_parameters", "a JSON object, with llama_4_scaling_beta")
    rope = read_rope(config, sizes.rotary_dim)
    beta = section.number("llama_4_scaling_beta", 0.0)
    if beta:
        original = section.integer("original_max_position_embeddings", high=MAX_POSITIONS)
        rope = replace(rope, query_scale_beta=beta, original_max_position=original)
    return {"rope": rope, **_read_uniform_window(config, sizes)}


def _read_smollm3(config: ConfigFile, sizes: ModelSizes) -> Fields:
    interval = config.integer("no_rope_layer_interval", 4)
    has_rope = layer_mask_except_every_nth(interval, sizes.num_layers)
    if "no_rope_layers" in config:
        accepted = f"a list of num_hidden_layers={sizes.num_layers} numbers, 0 for no RoPE"
        flags = config.checked_list("no_rope_layers", accepted, (0, 1).__contains__)
        if len(flags) < sizes.num_layers:
            raise config.field_error("no_rope_layers", accepted)
        has_rope = tuple(map(bool, flags[: sizes.num_layers]))
    window = read_optional_window(config, sizes, tuple(not each for each in has_rope))
    return {**_read_llama(config, sizes), **window, **_read_optional_ropes(config, sizes, has_rope)}


def _read_optional_ropes(
    config: ConfigFile, sizes: ModelSizes, has_rope: tuple[bool, ...]
) -> Fields:
    """Read the RoPE of the layers that ``has_rope`` marks; the other layers have none."""
    rope = read_rope(config, sizes.rotary_dim)
    return {"layer_ropes": tuple(rope if each else NO_ROPE for each in has_rope)}


def _layer_rope_fields(ropes: Mapping[str, RopeConfig], sliding_layers: tuple[bool, ...]) -> Fields:
    """Choose each layer's RoPE: that of sliding layers or that of full-attention layers."""
    return {
        "layer_ropes": tuple(
            ropes[SLIDING_ATTENTION if each else FULL_ATTENTION] for each in sliding_layers
        )
    }


def _read_olmo2(config: ConfigFile, sizes: ModelSizes) -> Fields:
    return {
        "qk_norm": True,
        "norms_span_all_heads": True,
        "float32_norm_weights": True,
        **read_biases(config),
    }


def _read_olmo3(config: ConfigFile, sizes: ModelSizes) -> Fields:
    window = read_window(config, layer_mask_except_every_nth(4, sizes.num_layers))
    theta = config.number("rope_theta", 500_000.0, exclusive_low=True)
    ropes = read_layer_ropes(
        config, sizes.rotary_dim, {FULL_ATTENTION: theta, SLIDING_ATTENTION: theta}
    )
    return {
        **_read_olmo2(config, sizes),
        **window,
        **_layer_rope_fields(ropes, window["sliding_layers"]),
    }


def _read_phi3(config: ConfigFile, sizes: ModelSizes) -> Fields:
    # In the first Phi-3 checkpoints, "su" and "yarn" are names of the RoPE type "longrope".
    rope = read_rope(config, sizes.rotary_dim, {"su": "longrope", "yarn": "longrope"})
    return {"rope": rope, **_read_uniform_window(config, sizes)}


def _read_granite(config: ConfigFile, sizes: ModelSizes) -> Fields:
    return {
        **_read_llama(config, sizes),
        "embedding_multiplier": config.number("embedding_multiplier", 1.0, exclusive_low=True),
        "residual_multiplier": config.number("residual_multiplier", 1.0, exclusive_low=True),
        "attention_scale": config.number("attention_multiplier", 1.0, exclusive_low=True),
        "logits_divisor": config.number("logits_scaling", 1.0, exclusive_low=True),
    }


def _is_dense_granite4(config: ConfigFile) -> bool:
    """Whether every layer of a Granite 4 model has attention, and no layer has experts."""
    kinds = config.values.get("layer_types")
    attends = isinstance(kinds, list) and all(
        each in ("attention", FULL_ATTENTION) for each in kinds
    )
    return attends and config.values.get("num_local_experts") == 0


def _read_granite4(config: ConfigFile, sizes: ModelSizes) -> Fields:
    fields = _read_granite(config, sizes)
    fields |= {"mlp_bias": False, "intermediate_size": config.integer("shared_intermediate_size")}
    has_rope = config.choice("position_embedding_type", ("rope",), None) is not None
    return {**fields, **_read_optional_ropes(config, sizes, (has_rope,) * sizes.num_layers)}


def _read_glm4(config: ConfigFile, sizes: ModelSizes) -> Fields:
    bias = config.boolean("attention_bias", True)
    return {"attention_bias": bias, "interleaved_rope": True}


def _read_gemma(config: ConfigFile, sizes: ModelSizes) -> Fields:
    """Read the fields that Gemma 2 and 3 have in common.

    Their norms multiply by ``1 + weight`` in float32, and their embeddings are scaled.
    """
    if config.values.get("use_bidirectional_attention"):
        raise config.field_error("use_bidirectional_attention", "false: a decoder")
    return {
        **read_biases(config),
        "norm_offset": 1.0,
        "float32_norm_weights": True,
        "embedding_multiplier": sizes.hidden_size**0.5,
        "rounds_embedding_multiplier": True,
        "attention_scale": config.number("query_pre_attn_scalar", 256, exclusive_low=True) ** -0.5,
        "logits_softcap": config.number("final_logit_softcapping", None, exclusive_low=True),
    }


def _read_gemma2(config: ConfigFile, sizes: ModelSizes) -> Fields:
    softcap = config.number("attn_logit_softcapping", None, exclusive_low=True)
    window = read_window(config, layer_mask_except_every_nth(2, sizes.num_layers))
    return {**_read_gemma(config, sizes), **window, "attention_softcap": softcap}


def _read_gemma3(config: ConfigFile, sizes: ModelSizes) -> Fields:
    if "attn_logit_softcapping" in config:
        raise config.field_error("attn_logit_softcapping", "null: Gemma 3 does not cap scores")
    window = read_window(
        config,
        layer_mask_except_every_nth(config.integer("sliding_window_pattern", 6), sizes.num_layers),
    )
    default_thetas = {
        FULL_ATTENTION: config.number("rope_theta", 1e6, exclusive_low=True),
        SLIDING_ATTENTION: config.number("rope_local_base_freq", 1e4, exclusive_low=True),
    }
    ropes = read_layer_ropes(config, sizes.rotary_dim, default_thetas)
    layers = _layer_rope_fields(ropes, window["sliding_layers"])
    return {**_read_gemma(config, sizes), "qk_norm": True, **window, **layers}


SANDWICH_NORM_TENSOR_NAMES = TensorNames(
    post_norm="pre_feedforward_layernorm",
    mixer_norm="post_attention_layernorm",
    mlp_norm="post_feedforward_layernorm",
)
POST_NORM_TENSOR_NAMES = replace(SANDWICH_NORM_TENSOR_NAMES, input_norm=None, post_norm=None)
FUSED_TENSOR_NAMES = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
SHARED_MLP_TENSOR_NAMES = TensorNames(
    mlp="shared_mlp", gate_up=("input_linear",), down="output_linear"
)
GLM4_TENSOR_NAMES = TensorNames(
    mixer_norm="post_self_attn_layernorm",
    mlp_norm="post_mlp_layernorm",
    gate_up=("gate_up_proj",),
)

MHA_DEFAULTS = {"num_key_value_heads": None}
"""Defaults of families with multi-head attention: as many key/value heads as query heads."""

_GEMMA_DEFAULTS: Fields = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_GEMMA2_DEFAULTS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    **_GEMMA_DEFAULTS,
}
# Multimodal checkpoints leave out fields with transformers' default value, sizes included.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    **_GEMMA_DEFAULTS,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", MHA_DEFAULTS, (2,), read_fields=_read_llama),
    "mistral": Family(
        "MistralForCausalLM", {"sliding_window": 4096}, (2,), read_fields=_read_uniform_window
    ),
    "qwen2": Family("Qwen2ForCausalLM", {"sliding_window": 4096}, read_fields=_read_qwen2),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"sliding_window": 4096, "head_dim": 128}, read_fields=_read_qwen3
    ),
    # Qwen3-VL's multimodal RoPE has a time, a height and a width position. Text tokens have the
    # same value for all three, so plain RoPE computes the same.
    "qwen3_vl_text": Family(
        "Qwen3ForCausalLM",
        {"sliding_window": 4096, "head_dim": 128, "rope_theta": 500_000.0},
        can_be_text_part=True,
        read_fields=_read_qwen3,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {"head_dim": 128, "rms_norm_eps": 1e-5},
        (2,),
        can_be_text_part=True,
        read_fields=_read_ministral3,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
        (128_001,),
        read_fields=_read_smollm3,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        MHA_DEFAULTS | {"rms_norm_eps": 1e-5},
        (50_279,),
        tensor_names=POST_NORM_TENSOR_NAMES,
        read_fields=_read_olmo2,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        MHA_DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": 4096},
        (50_279,),
        tensor_names=POST_NORM_TENSOR_NAMES,
        read_fields=_read_olmo3,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        MHA_DEFAULTS | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        (32_000,),
        tensor_names=FUSED_TENSOR_NAMES,
        partial_rotary_factor=1.0,
        read_fields=_read_phi3,
    ),
    "granite": Family("GraniteForCausalLM", MHA_DEFAULTS, (2,), read_fields=_read_granite),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        MHA_DEFAULTS | {"shared_intermediate_size": 1024},
        (2,),
        tensor_names=SHARED_MLP_TENSOR_NAMES,
        is_supported=_is_dense_granite4,
        read_fields=_read_granite4,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {"head_dim": 128, "rms_norm_eps": 1.5625e-7},
        (151_329, 151_336, 151_338),
        tensor_names=GLM4_TENSOR_NAMES,
        partial_rotary_factor=0.5,
        read_fields=_read_glm4,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA2_DEFAULTS,
        (1,),
        tensor_names=SANDWICH_NORM_TENSOR_NAMES,
        activation_field="hidden_activation",
        read_fields=_read_gemma2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA3_DEFAULTS,
        (1,),
        tensor_names=SANDWICH_NORM_TENSOR_NAMES,
        activation_field="hidden_activation",
        can_be_text_part=True,
        read_fields=_read_gemma3,
    ),
}
"""Families by ``model_type``."""
