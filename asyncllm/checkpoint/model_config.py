"""ModelConfig: a checkpoint's description of itself, read without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncllm.checkpoint.config_file import REQUIRED, ConfigFile
from asyncllm.checkpoint.gguf_config import gguf_config
from asyncllm.checkpoint.gguf_file import GGUFFile
from asyncllm.checkpoint.model_files import GGUF_SUFFIX
from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.sampling_params import NEUTRAL, SamplingParams

QUANT_METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gguf", "gptq", "mxfp4")

MAX_LAYERS = 1024
MAX_POSITIONS = 2**31 - 1
"""Positions are int32 on a device."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. ``kind`` "llama3" rescales frequencies as Llama 3.1 does, "linear"
    divides every position by ``factor``; the fields below ``factor`` are llama3's alone."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder, from its ``config.json`` and ``generation_config.json``, or its GGUF file.

    Attributes:
        path: local directory of the files, or the GGUF file.
        architecture: e.g. "Qwen3ForCausalLM".
        max_position_embeddings: the model's context in tokens.
        dtype: the checkpoint's own: "float32", "bfloat16" or "float16"; "float32" where the
            files do not say.
        qk_norm: RMSNorm over each query and key head before RoPE (Qwen3).
        attention_bias: biases on q, k and v; ``output_bias`` on o; ``mlp_bias`` on the MLP.
        sliding_window: positions each token sees, itself included, in the layers where
            ``sliding_layers[layer]`` is True; None where no layer has one.
        sliding_layers: one entry per layer.
        eos_token_ids: ids that end an output, those of ``generation_config`` first.
        quantization: ``quant_method`` of the checkpoint's weights; None for plain ones.
        generation_defaults: ``temperature``, ``top_p``, ``top_k``, ``min_p`` and
            ``repetition_penalty`` where ``generation_config`` sets them, with any
            ``do_sample``, as in vLLM.
        is_text_part: the checkpoint has other towers as well.
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
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None
    generation_defaults: Mapping[str, Any] | None = None
    is_text_part: bool = False

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Reads the configuration in a directory or a GGUF file; both generations of
        transformers' keys.

        A field that is absent has the default that transformers gives it for that
        architecture, except the sizes, which must be there.

        Raises:
            ModelLoadError: for a missing or damaged file, an architecture, RoPE type,
                activation or quantisation that is not supported, a field that is missing or
                of the wrong kind, and numbers that contradict each other. The message names
                the file, the field, its value and what would have been accepted.
        """
        directory = Path(path)
        if directory.suffix == GGUF_SUFFIX:
            config, generation = gguf_config(GGUFFile(directory)), ConfigFile(directory, {})
        else:
            config = ConfigFile.read(directory / "config.json")
            generation = ConfigFile.read_if_present(directory / "generation_config.json")
        architecture = _architecture(config)
        is_text_part = architecture == QWEN3_VL
        if is_text_part:
            config, architecture = _text_config(config), "Qwen3ForCausalLM"
        _refuse_unsupported(config)
        vocab_size = config.integer("vocab_size")
        num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
        window, sliding_layers = _sliding_window(config, architecture, num_layers)
        return cls(
            path=directory,
            architecture=architecture,
            vocab_size=vocab_size,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=num_layers,
            max_position_embeddings=_positions(config),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6, high=1.0, open_low=True),
            rope=_rope(config),
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            dtype=_dtype(config),
            qk_norm=architecture == "Qwen3ForCausalLM",
            mlp_bias=architecture == "LlamaForCausalLM" and config.boolean("mlp_bias", False),
            sliding_window=window,
            sliding_layers=sliding_layers,
            quantization=quant_method(config),
            generation_defaults=generation_defaults(generation),
            eos_token_ids=_eos_token_ids(config, generation, architecture, vocab_size),
            is_text_part=is_text_part,
            **_heads(config, architecture),
            **_attention_biases(config, architecture),
        )


QWEN3_VL = "Qwen3VLForConditionalGeneration"

_ARCHITECTURE_OF = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl": QWEN3_VL,
}


def has_native_decoder(config: ConfigFile) -> bool:
    """Whether the engine's own decoder has the architecture."""
    names = config.values.get("architectures")
    if names is None:
        return config.values.get("model_type") in _ARCHITECTURE_OF
    return isinstance(names, list) and any(name in _ARCHITECTURE_OF.values() for name in names)


def _architecture(config: ConfigFile) -> str:
    """``architectures`` where it is set, else what ``model_type`` implies, as for files that
    were saved from a configuration without a model."""
    supported = tuple(_ARCHITECTURE_OF.values())
    names = config.values.get("architectures")
    if names is None and "model_type" in config:
        return _ARCHITECTURE_OF[config.choice("model_type", tuple(_ARCHITECTURE_OF))]
    for name in names if isinstance(names, list) else ():
        if name in supported:
            return name
    raise config.bad("architectures", f"a list with one of {', '.join(supported)}")


def _text_config(config: ConfigFile) -> ConfigFile:
    """The text model's fields. Whether the head is tied, and what ends an output, the whole says
    where it does. The positions of text are the same in the three parts of its RoPE (mrope)."""
    stated = ("tie_word_embeddings", "eos_token_id", "quantization_config", "dtype", "torch_dtype")
    whole = {name: config.values[name] for name in stated if name in config}
    return ConfigFile(config.path, {**config.section("text_config").values, **whole})


def _refuse_unsupported(config: ConfigFile) -> None:
    config.choice("hidden_act", ("silu", "swish"), "silu")
    for holder in (config, config.section("rope_parameters")):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.bad("partial_rotary_factor", "1.0")


def quant_method(config: ConfigFile) -> str | None:
    """``quant_method`` of the checkpoint's weights; None for plain ones.

    Raises:
        ModelLoadError: one that is not read.
    """
    if "quantization_config" not in config:
        return None
    return config.section("quantization_config").choice("quant_method", QUANT_METHODS)


def _positions(config: ConfigFile) -> int:
    return config.integer("max_position_embeddings", high=MAX_POSITIONS)


def _heads(config: ConfigFile, architecture: str) -> dict[str, Any]:
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    # null means "as many as query heads" everywhere, absence only for Llama: the others'
    # default in transformers is a number that fits no checkpoint but the first of its kind.
    stated = architecture == "LlamaForCausalLM" or "num_key_value_heads" in config.values
    num_kv_heads = config.integer("num_key_value_heads", num_heads if stated else REQUIRED)
    if num_heads % num_kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    if "head_dim" in config:
        head_dim = config.integer("head_dim")
    elif architecture == "Qwen3ForCausalLM" and "head_dim" not in config.values:
        head_dim = 128
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        accepted = f"a multiple of num_attention_heads={num_heads} where head_dim is not given"
        raise config.bad("hidden_size", accepted)
    if head_dim % 2:
        raise ModelLoadError(f"{config.path}: head_dim is {head_dim}, expected an even number")
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def _attention_biases(config: ConfigFile, architecture: str) -> dict[str, Any]:
    if architecture == "Qwen2ForCausalLM":
        return {"attention_bias": True, "output_bias": False}
    if architecture == "MistralForCausalLM":
        return {"attention_bias": False, "output_bias": False}
    bias = config.boolean("attention_bias", False)
    return {"attention_bias": bias, "output_bias": bias}


def _rope(config: ConfigFile) -> RopeConfig:
    # transformers reads rope_scaling first where a file has both.
    name = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    section = config.section(name)
    if any(isinstance(value, dict) for value in section.values.values()):
        raise config.bad(name, "one set of RoPE parameters for all layers")
    theta = section.number("rope_theta", None, open_low=True) or config.number(
        "rope_theta", 10_000.0, open_low=True
    )
    key = "rope_type" if "rope_type" in section else "type"
    kind = section.choice(key, ("default", "linear", "llama3"), "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = section.number("factor", low=1.0)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    low = section.number("low_freq_factor", open_low=True)
    high = section.number("high_freq_factor", open_low=True)
    if high <= low:
        raise section.bad("high_freq_factor", f"a number above low_freq_factor={low:g}")
    original = section.integer(
        "original_max_position_embeddings", _positions(config), high=MAX_POSITIONS
    )
    return RopeConfig(theta, "llama3", factor, low, high, original)


def _sliding_window(
    config: ConfigFile, architecture: str, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    if architecture == "LlamaForCausalLM":
        return None, (False,) * num_layers
    in_all_or_none = architecture == "MistralForCausalLM"
    window = None
    if in_all_or_none or config.boolean("use_sliding_window", False):
        # Absent is 4096 in transformers; null switches it off, as from Mistral 7B v0.2 on.
        absent = "sliding_window" not in config.values
        window = config.integer("sliding_window", 4096 if absent else None, high=MAX_POSITIONS)
    first = 0 if in_all_or_none else config.integer("max_window_layers", 28, low=0)
    implied = tuple(window is not None and i >= first for i in range(num_layers))
    layers = _layer_types(config, implied)
    if in_all_or_none and layers != implied:
        kind = "full_attention" if window is None else "sliding_attention"
        raise config.bad("layer_types", f"{kind!r} alone, as sliding_window={window} implies")
    if any(layers) and window is None:
        raise config.bad("layer_types", "full_attention alone where no sliding window is in use")
    return (window if any(layers) else None), layers


def _layer_types(config: ConfigFile, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """True for each layer that ``layer_types`` calls sliding; ``default`` without it."""
    if "layer_types" not in config:
        return default
    kinds = config.values["layer_types"]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != len(default):
        raise config.bad("layer_types", f"a list of num_hidden_layers={len(default)} names")
    if any(kind not in known for kind in kinds):
        raise config.bad("layer_types", f"a list of {' or '.join(known)}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _dtype(config: ConfigFile) -> str:
    name = "dtype" if "dtype" in config else "torch_dtype"
    return config.choice(name, ("float32", "bfloat16", "float16"), "float32")


def _eos_token_ids(
    config: ConfigFile, generation: ConfigFile, architecture: str, vocab_size: int
) -> tuple[int, ...]:
    eos = generation.token_ids("eos_token_id", vocab_size)
    eos += config.token_ids("eos_token_id", vocab_size)
    if not eos and "eos_token_id" not in config.values:
        # What these two have in a file that says nothing of it.
        eos = (2,) if architecture in ("LlamaForCausalLM", "MistralForCausalLM") else ()
    return tuple(dict.fromkeys(eos))


def generation_defaults(generation: ConfigFile) -> dict[str, Any]:
    # Checked here, because a request that merely leaves the field unset must not be the
    # first to find a bad value in the file.
    values = {name: generation.values[name] for name in NEUTRAL if name in generation}
    try:
        params = SamplingParams(**values)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{generation.path}: {error}") from error
    return {name: getattr(params, name) for name in values}
