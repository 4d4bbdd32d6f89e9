"""ModelConfig: configuration of a checkpoint, read without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncllm import validation as check
from asyncllm.checkpoint.config_file import REQUIRED, ConfigFile
from asyncllm.checkpoint.experts_config import ExpertsConfig
from asyncllm.checkpoint.families import FAMILIES as DENSE_FAMILIES
from asyncllm.checkpoint.families import PRE_NORM_TENSOR_NAMES, Family, ModelSizes, TensorNames
from asyncllm.checkpoint.gguf_choice import is_gguf
from asyncllm.checkpoint.gguf_config import gguf_config
from asyncllm.checkpoint.gguf_file import GGUFFile
from asyncllm.checkpoint.layer_config import LayerConfig, PerLayerInputConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.checkpoint.mixed_families import MOE_AND_HYBRID_FAMILIES
from asyncllm.checkpoint.rope_config import (
    MAX_POSITIONS,
    RopeConfig,
    read_rope,
    rope_parameters_section,
)
from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.sampling_params import NEUTRAL_VALUES, SamplingParams

Activation = Literal["gelu_tanh", "silu"]

QUANT_METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gguf", "gptq", "mxfp4")

FAMILIES = DENSE_FAMILIES | MOE_AND_HYBRID_FAMILIES
"""Families by ``model_type``."""

MAX_LAYERS = 1024

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""The engine's activation by the name in config.json."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder, read from config.json and generation_config.json, or GGUF.

    Attributes:
        path: local directory of the files, or the GGUF file.
        architecture: e.g. "Qwen3ForCausalLM".
        max_position_embeddings: the model's context length in tokens.
        dtype: the checkpoint's dtype: "float32", "bfloat16" or "float16"; "float32" by default.
        is_text_part: whether the model is the text part of a multimodal checkpoint.
        names: names of a layer's tensors. A layer only has the norms that are named here.
        qk_norm: RMSNorm of queries and keys before RoPE: per head (Qwen3), or over all heads
            together if ``norms_span_all_heads`` (OLMo 2).
        value_norm: per-head RMSNorm of values, without weights.
        norm_offset: number added to the weights of norms (1 for Gemma).
        float32_norm_weights: whether norms multiply by their weight in float32, and round once.
        attention_bias, output_bias, mlp_bias: biases of the projections q, k and v, of o, and of
            the MLP.
        attention_scale: factor of attention scores; None for ``head_dim ** -0.5``.
        attention_softcap, logits_softcap: cap of attention scores and of logits:
            ``cap * tanh(x / cap)``; None for no cap.
        embedding_multiplier: factor of embeddings.
        rounds_embedding_multiplier: whether ``embedding_multiplier`` is first rounded to the
            model's dtype.
        residual_multiplier: factor of a block's output, before it is added to the residual.
        logits_divisor: divisor of the logits.
        rope: RoPE of all layers if ``layer_ropes`` is empty.
        layer_ropes: RoPE of each layer; empty if all layers have ``rope``.
        rotary_dim: number of leading elements of a head that RoPE rotates; None for all.
        interleaved_rope: whether RoPE rotates pairs of adjacent elements, instead of pairing the
            first half of a head with the second.
        sliding_window: number of positions that a token attends to, itself included, in
            sliding-window layers; None if there are none.
        sliding_layers: one entry per layer: whether it has the sliding window.
        layers: sizes of each layer if they differ; () if all are equal.
        layer_input: configuration of per-layer embeddings; None for none.
        layer_scalar: whether each layer's output is multiplied by a number from the checkpoint.
        sinks: whether attention has a learned logit per query head, which takes part in the softmax
            of the scores.
        gated_attention: whether attention's output is multiplied, element by element, by the
            sigmoid of a gate. In a checkpoint the gate rows of a head follow its query rows.
        linear_attention: configuration of layers with linear attention; None for none.
        experts: configuration of layers with experts; None for none.
        num_unused_layers: number of further layers in the checkpoint that the decoder does not run
            (multi-token prediction).
        eos_token_ids: ids that end an output; those of generation_config.json come first.
        quantization: ``quant_method`` of the checkpoint; None if the weights are not quantised.
        generation_defaults: sampling parameters that generation_config.json sets:
            ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``.
            ``do_sample`` is ignored, as in vLLM.
    """

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str = "float32"
    is_text_part: bool = False
    names: TensorNames = PRE_NORM_TENSOR_NAMES
    activation: Activation = "silu"
    qk_norm: bool = False
    value_norm: bool = False
    norms_span_all_heads: bool = False
    norm_offset: float = 0.0
    float32_norm_weights: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    layer_ropes: tuple[RopeConfig, ...] = ()
    rotary_dim: int | None = None
    interleaved_rope: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    layers: tuple[LayerConfig, ...] = ()
    layer_input: PerLayerInputConfig | None = None
    layer_scalar: bool = False
    sinks: bool = False
    gated_attention: bool = False
    linear_attention: LinearAttentionConfig | None = None
    experts: ExpertsConfig | None = None
    num_unused_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None
    generation_defaults: Mapping[str, Any] | None = None

    def layer(self, index: int) -> LayerConfig:
        """Sizes of layer ``index``."""
        if self.layers:
            return self.layers[index]
        return LayerConfig(self.num_kv_heads, self.head_dim, self.intermediate_size)

    @classmethod
    def from_directory(
        cls,
        path: str | os.PathLike[str],
        *,
        overrides: Mapping[str, Any] | None = None,
        use_generation_defaults: bool = True,
    ) -> ModelConfig:
        """Read the configuration in a directory or a GGUF file.

        Field names of transformers 4 and 5 are read. An absent field has transformers' default for
        the architecture; sizes are required.

        Args:
            overrides: ``EngineConfig.hf_overrides``.
            use_generation_defaults: read ``generation_defaults``; False leaves them empty.

        Raises:
            ModelLoadError: for a missing or damaged file; for an unsupported architecture, RoPE
                type, activation or quantisation; for a missing or invalid field; for fields that
                contradict each other. The message names the file, the field, its value and the
                accepted values.
            InvalidRequestError: for ``overrides`` of a GGUF file.
        """
        directory = Path(path)
        if is_gguf(directory):
            if overrides:
                accepted = f"None with {directory}: a GGUF file has no config.json"
                raise check.value_error("hf_overrides", overrides, accepted)
            return cls.from_gguf(GGUFFile(directory))
        config = ConfigFile.read(directory / "config.json").with_overrides(overrides)
        generation_config = ConfigFile.read_if_present(directory / "generation_config.json")
        defaults = generation_defaults(generation_config, use_generation_defaults)
        return cls._from_config(directory, config, generation_config, defaults)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ModelConfig:
        """Read the configuration of a GGUF file; errors as for ``from_directory``."""
        return cls._from_config(file.path, gguf_config(file), ConfigFile(file.path, {}), {})

    @classmethod
    def _from_config(
        cls,
        path: Path,
        file: ConfigFile,
        generation_config: ConfigFile,
        defaults: Mapping[str, Any],
    ) -> ModelConfig:
        family, config, is_text_part = _apply_family_defaults(file)
        vocab_size = config.integer("vocab_size")
        num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
        context = config.integer("max_position_embeddings", high=MAX_POSITIONS)
        eos_token_ids = read_eos_token_ids(generation_config, file, vocab_size)
        if not eos_token_ids and not any("eos_token_id" in each.values for each in (file, config)):
            eos_token_ids = tuple(each for each in family.eos_token_ids if each < vocab_size)
        heads = _read_head_sizes(config)
        rotary_dim = _read_rotary_dim(config, family, heads["head_dim"])
        sizes = ModelSizes(num_layers, heads["hidden_size"], heads["head_dim"], rotary_dim)
        fields = heads | {
            "rotary_dim": rotary_dim if rotary_dim < sizes.head_dim else None,
            "sliding_layers": (False,) * num_layers,
            **family.read_fields(config, sizes),
        }
        if "experts" in fields and not any(fields["experts"].layers):
            del fields["experts"]
        if "intermediate_size" not in fields:
            fields["intermediate_size"] = config.integer("intermediate_size")
        if "layer_ropes" in fields:
            fields["rope"] = fields["layer_ropes"][0]
        elif "rope" not in fields:
            fields["rope"] = read_rope(config, rotary_dim)
        return cls(
            path=path,
            architecture=family.architecture,
            vocab_size=vocab_size,
            num_layers=num_layers,
            max_position_embeddings=context,
            rms_norm_eps=config.number("rms_norm_eps", 1e-6, high=1.0, exclusive_low=True),
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            dtype=_read_dtype(config),
            num_unused_layers=config.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS),
            is_text_part=is_text_part,
            names=family.tensor_names,
            activation=ACTIVATIONS[
                config.choice(family.activation_field, tuple(ACTIVATIONS), "silu")
            ],
            quantization=quant_method(config),
            generation_defaults=defaults,
            eos_token_ids=eos_token_ids,
            **fields,
        )


def has_native_decoder(config: ConfigFile) -> bool:
    """Whether the engine's own decoder supports the checkpoint's architecture."""
    return _find_family(config) is not None


def _find_family(config: ConfigFile) -> tuple[Family, bool] | None:
    """Find the family of a file; None if the decoder does not support the architecture.

    ``architectures`` is absent in a configuration that was saved without its model; ``model_type``
    then decides.

    Returns:
        The family, and whether the model is the text part of a multimodal one.
    """
    text, names = config.values.get("text_config"), config.values.get("architectures")
    is_text_part = isinstance(text, dict)
    if is_text_part or names is None:
        fields = text if is_text_part else config.values
        family = FAMILIES.get(str(fields.get("model_type")))
    else:
        families = (
            f for f in FAMILIES.values() if isinstance(names, list) and f.architecture in names
        )
        family = next(families, None)
    if family is None or (is_text_part and not family.can_be_text_part):
        return None
    is_supported = family.is_supported is None or family.is_supported(config)
    return (family, is_text_part) if is_supported else None


def _apply_family_defaults(config: ConfigFile) -> tuple[Family, ConfigFile, bool]:
    """Add the defaults of the family to a file's fields.

    Returns:
        The family, the file with the defaults, and whether the model is the text part of a
        multimodal one.

    Raises:
        ModelLoadError: if the decoder does not support the architecture.
    """
    match = _find_family(config)
    if match is None:
        if "architectures" not in config and "model_type" in config:
            config.choice("model_type", tuple(FAMILIES))
        supported = ", ".join(family.architecture for family in FAMILIES.values())
        raise config.field_error("architectures", f"a list with one of {supported}")
    family, is_text_part = match
    values = dict(config.values)
    if is_text_part:
        # ``text_config`` may lack fields of ``shared`` or contradict the top-level ones, so the
        # top-level ones win.
        shared = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
        outer = {name: values[name] for name in shared if values.get(name) is not None}
        inner = values["text_config"]
        values = {**inner, **outer}
    return family, ConfigFile(config.path, {**family.defaults, **values}), is_text_part


def _read_rotary_dim(config: ConfigFile, family: Family, head_dim: int) -> int:
    """Number of elements of a head that RoPE rotates, from ``partial_rotary_factor``."""
    section, name = rope_parameters_section(config), "partial_rotary_factor"
    for holder in (config, section):
        factor = holder.number(name, 1.0, high=1.0, exclusive_low=True)
        if family.partial_rotary_factor is None and factor != 1.0:
            raise holder.field_error(name, "1.0")
    holder = section if name in section else config
    factor = holder.number(
        name,
        1.0 if family.partial_rotary_factor is None else family.partial_rotary_factor,
        high=1.0,
    )
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise holder.field_error(
            name, f"one that rotates an even number of head_dim={head_dim} elements"
        )
    return rotary_dim


def quant_method(config: ConfigFile) -> str | None:
    """``quant_method`` of a checkpoint; None if the weights are not quantised.

    Raises:
        ModelLoadError: for an unsupported method.
    """
    if "quantization_config" not in config:
        return None
    return config.section("quantization_config").choice("quant_method", QUANT_METHODS)


def _read_head_sizes(config: ConfigFile) -> dict[str, Any]:
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    # null means as many key/value heads as query heads. An absent field means the same only in
    # families with MHA_DEFAULTS; in others it is an error, because transformers' default is the
    # number of the family's first checkpoint.
    stated = "num_key_value_heads" in config.values
    num_kv_heads = config.integer("num_key_value_heads", num_heads if stated else REQUIRED)
    if num_heads % num_kv_heads:
        raise config.field_error(
            "num_key_value_heads", f"a divisor of num_attention_heads={num_heads}"
        )
    if "head_dim" in config:
        head_dim = config.integer("head_dim")
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        accepted = f"a multiple of num_attention_heads={num_heads} where head_dim is not given"
        raise config.field_error("hidden_size", accepted)
    if head_dim % 2:
        raise ModelLoadError(f"{config.path}: head_dim is {head_dim}, expected an even number")
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def _read_dtype(config: ConfigFile) -> str:
    name = "dtype" if "dtype" in config else "torch_dtype"
    return config.choice(name, ("float32", "bfloat16", "float16"), "float32")


def read_eos_token_ids(
    generation_config: ConfigFile, file: ConfigFile, vocab_size: int
) -> tuple[int, ...]:
    """Read the end tokens of all files: those of generation_config.json come first."""
    ids = [
        token_id
        for each in (generation_config, file, file.section("text_config"))
        for token_id in each.token_ids("eos_token_id", vocab_size)
    ]
    return tuple(dict.fromkeys(ids))


def generation_defaults(
    generation_config: ConfigFile, use_generation_defaults: bool
) -> dict[str, Any]:
    """Read the sampling parameters that generation_config.json sets; none if they are not used."""
    # Check the values at load: otherwise a request that leaves a parameter unset would fail for
    # the file's bad value.
    names = [
        name for name in NEUTRAL_VALUES if use_generation_defaults and name in generation_config
    ]
    values = {name: generation_config.values[name] for name in names}
    try:
        params = SamplingParams(**values)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{generation_config.path}: {error}") from error
    return {name: getattr(params, name) for name in values}
