"""gguf_config: converts the metadata of a GGUF file to the fields of config.json.

transformers' own conversion is not used: it drops the head size and the RoPE factors, so the
results would be wrong.
"""

from __future__ import annotations

import math
from typing import Any

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_families import GGUF_FAMILIES, GGUFFamily
from asyncllm.checkpoint.gguf_file import GGUFFile
from asyncllm.checkpoint.gguf_vocabulary import end_token_ids
from asyncllm.checkpoint.rope_config import MAX_POSITIONS
from asyncllm.errors import ModelLoadError

_RENAMED_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_COMMON_ACCEPTED_KEYS = (
    "attention.key_length attention.value_length attention.causal attention.sliding_window "
    "attention.sliding_window_pattern rope.dimension_count "
    "rope.scaling.type rope.scaling.factor rope.scaling.original_context_length "
    "rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_ext_factor "
    "rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow "
    "rope.scaling.yarn_log_multiplier vocab_size expert_count expert_used_count"
).split()
"""Metadata keys, beside ``_RENAMED_KEYS``, that files of every architecture may have."""

_YARN_KEYS = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
    "yarn_log_multiplier": "mscale_all_dim",
}
_ONLY_SUPPORTED_VALUES = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0}

LLAMA3_FREQUENCY_PARAMETERS = (1.0, 4.0, 8192)
"""low_freq_factor, high_freq_factor and original_max_position_embeddings of Llama 3.1 to 3.3. A
GGUF file does not store them, only the frequency factors computed from them."""


def gguf_family(file: GGUFFile) -> GGUFFamily:
    """Find the row of ``GGUF_FAMILIES`` for a file.

    Raises:
        ModelLoadError: for an unsupported architecture.
    """
    metadata = ConfigFile(file.path, file.metadata)
    name = metadata.choice("general.architecture", tuple(GGUF_FAMILIES))
    family = GGUF_FAMILIES[name]
    if family.variant is not None and metadata.values.get(f"{name}.{family.variant[0]}"):
        return family.variant[1]
    return family


def gguf_config(file: GGUFFile) -> ConfigFile:
    """Convert a GGUF file's metadata to the fields that ModelConfig reads.

    Raises:
        ModelLoadError: for an unsupported architecture or value.
    """
    family = gguf_family(file)
    prefix = f"{file.metadata['general.architecture']}."
    values = {
        key.removeprefix(prefix): _single_value_if_equal(key.removeprefix(prefix), value)
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    fields = ConfigFile(file.path, values)
    _check_fields(fields, prefix, family)
    copied = {**_RENAMED_KEYS, **family.fields}
    config = {**family.constants}
    config |= {name: values[key] for key, name in copied.items() if key in values}
    config |= {
        "architectures": [family.architecture],
        "num_hidden_layers": _num_layers(fields),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": _has_tensor(file, "attn_q.bias"),
        "mlp_bias": _has_tensor(file, "ffn_down.bias"),
        "use_qk_norm": _has_tensor(file, "attn_q_norm.weight"),
        "eos_token_id": end_token_ids(file) or None,
        "dtype": _model_dtype(file),
        **_head_sizes(fields, family),
        **_sliding_window_fields(fields, family, _num_layers(fields)),
        **_rope_scaling_fields(file, fields, family),
        **(_linear_attention_fields(fields) if "ssm.group_count" in family.fields else {}),
    }
    if "rope.freq_base_swa" in fields:
        # Sliding layers have their own RoPE base. RoPE scaling is for full-attention layers only.
        theta = fields.number("rope.freq_base_swa", exclusive_low=True)
        config["rope_parameters"] = {"sliding_attention": {"rope_theta": theta}}
    if is_quantised(file):
        config["quantization_config"] = {"quant_method": "gguf"}
    return ConfigFile(file.path, config)


def _single_value_if_equal(key: str, value: Any) -> Any:
    """Replace a per-layer list of equal values by that value; return any other value unchanged."""
    is_listed = key in _RENAMED_KEYS and isinstance(value, list) and len(value) > 0
    return value[0] if is_listed and value.count(value[0]) == len(value) else value


def _check_fields(fields: ConfigFile, prefix: str, family: GGUFFamily) -> None:
    """Raise ModelLoadError for an unknown or missing key, or an unsupported value."""
    known = (
        _RENAMED_KEYS,
        _COMMON_ACCEPTED_KEYS,
        family.fields,
        family.expected_values,
        family.extra_keys,
    )
    for name in fields.values:
        if not any(name in names for names in known):
            raise fields.field_error(
                name, f"no such value of {prefix[:-1]}, which may change the model"
            )
    for name, value in {**_ONLY_SUPPORTED_VALUES, **family.expected_values}.items():
        if fields.values.get(name, value) != value:
            raise fields.field_error(name, f"{value}, the only one that is supported")
    for name in family.required_keys:
        fields.number(name)
    if "expert_count" not in family.fields and fields.integer("expert_count", 0, low=0) > 0:
        raise fields.field_error("expert_count", f"0: {prefix[:-1]} has no experts here")


def _num_layers(fields: ConfigFile) -> int:
    """Number of layers, without the last ones if they are for multi-token prediction."""
    count = fields.integer("block_count", high=2**16)
    return count - fields.integer("nextn_predict_layers", 0, low=0, high=count - 1)


def _has_tensor(file: GGUFFile, name: str) -> bool:
    return any(stored.startswith("blk.") and stored.endswith(f".{name}") for stored in file.tensors)


def _sliding_window_fields(
    fields: ConfigFile, family: GGUFFamily, num_layers: int
) -> dict[str, Any]:
    """Read the sliding window and the layers that have it.

    If the file does not list these layers, they are those that llama.cpp's code fixes for the
    architecture.
    """
    name, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    window = fields.integer(name, family.constants.get("sliding_window"), low=0, high=2**31 - 1)
    if not window:
        return {"sliding_window": None} if family.full_attention_interval is not None else {}
    interval = family.full_attention_interval
    if interval is None:
        raise fields.field_error(name, "0: which layers slide is not in the file")
    sliding = [interval == 0 or (layer + 1) % interval != 0 for layer in range(num_layers)]
    if pattern in fields:
        sliding = _layer_flags(fields, pattern)
    kinds = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return {"sliding_window": window, "layer_types": kinds}


def _layer_flags(fields: ConfigFile, name: str) -> list[bool]:
    """Read a list of one boolean per layer."""
    count = fields.integer("block_count")
    accepted = f"a list of block_count={count} booleans"
    return fields.checked_list(name, accepted, lambda flag: type(flag) is bool, count)


def _linear_attention_fields(fields: ConfigFile) -> dict[str, Any]:
    """Read the size of linear attention's value heads and, if the file lists them, the layers that
    have linear attention."""
    heads = fields.integer("ssm.time_step_rank")
    size = fields.integer("ssm.inner_size")
    if size % heads:
        raise fields.field_error("ssm.inner_size", f"a multiple of ssm.time_step_rank={heads}")
    config: dict[str, Any] = {"linear_value_head_dim": size // heads}
    if "attention.recurrent_layers" in fields:
        recurrent = _layer_flags(fields, "attention.recurrent_layers")[: _num_layers(fields)]
        kinds = ["linear_attention" if each else "full_attention" for each in recurrent]
        config["layer_types"] = kinds
    return config


def is_quantised(file: GGUFFile) -> bool:
    """Whether any tensor of the file is quantised."""
    return not all(tensor.is_unquantised for tensor in file.tensors.values())


def _head_dim(fields: ConfigFile) -> int:
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    size = fields.integer("attention.key_length", max(1, hidden // heads))
    if fields.integer("attention.value_length", size) != size:
        raise fields.field_error("attention.value_length", f"{size}, as the keys have")
    return size


def _head_sizes(fields: ConfigFile, family: GGUFFamily) -> dict[str, Any]:
    """Size of a head, the part of it that RoPE rotates, and Gemma's query scale."""
    name, size = "rope.dimension_count", _head_dim(fields)
    rotated = fields.integer(name, size, high=size if family.has_partial_rope else MAX_POSITIONS)
    if rotated != size and not family.has_partial_rope:
        raise fields.field_error(name, f"{size}, as the keys have")
    # Round the factor up, because its product with the head size is rounded down later.
    factor = 1.0 if rotated == size else math.nextafter(rotated / size, 1.0)
    config: dict[str, Any] = {"head_dim": size, "partial_rotary_factor": factor}
    if family.hidden_scale_num_layers:
        wide = fields.integer("block_count") == family.hidden_scale_num_layers
        per_head = fields.integer("embedding_length") // fields.integer("attention.head_count")
        config["query_pre_attn_scalar"] = per_head if wide else size
    return config


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor 'token_embd.weight' is missing")
    return embedding.shape[0]


def _model_dtype(file: GGUFFile) -> str:
    """Dtype of the model: float32 if all tensors are float32; float16 if all are float32 or
    float16; else bfloat16, as in training."""
    kinds = {tensor.type_name for tensor in file.tensors.values()}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _rope_scaling_fields(file: GGUFFile, fields: ConfigFile, family: GGUFFamily) -> dict[str, Any]:
    """Fields of config.json for RoPE scaling. As in llama.cpp, a factor without a type means linear
    scaling."""
    implied = "linear" if "rope.scaling.factor" in fields else "none"
    kind = fields.choice("rope.scaling.type", ("none", "linear", "yarn", "longrope"), implied)
    original = fields.integer("rope.scaling.original_context_length", None, high=MAX_POSITIONS)
    if "rope_freqs.weight" in file.tensors:
        return {"rope_scaling": _llama3_rope_parameters(file, fields)}
    if "rope_factors_long.weight" in file.tensors or kind == "longrope":
        return _longrope_parameters(file, fields, original)
    if fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise fields.field_error("rope.scaling.attn_factor", f"1.0 with {kind}")
    if kind == "none":
        return {"rope_scaling": None}
    rope = {"rope_type": kind, "factor": fields.number("rope.scaling.factor", low=1.0)}
    if kind == "yarn":
        rope |= family.yarn_parameters
        for key, name in _YARN_KEYS.items():
            if f"rope.scaling.{key}" in fields:
                rope[name] = fields.number(f"rope.scaling.{key}")
        if "mscale_all_dim" in rope:
            rope["mscale"] = 1.0  # llama.cpp assumes an mscale of 1.
        if original is not None:
            rope["original_max_position_embeddings"] = original
        if "attention.temperature_scale" in fields:
            rope["llama_4_scaling_beta"] = fields.number("attention.temperature_scale")
    return {"rope_scaling": rope}


def _longrope_parameters(
    file: GGUFFile, fields: ConfigFile, original_max_position: int | None
) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "longrope"}
    for length in ("long", "short"):
        name = f"rope_factors_{length}.weight"
        if name not in file.tensors:
            raise ModelLoadError(f"{file.path}: tensor {name!r} is missing")
        rope[f"{length}_factor"] = list(file.read_floats(name))
    if "rope.scaling.attn_factor" in fields:
        rope["attention_factor"] = fields.number("rope.scaling.attn_factor")
    if original_max_position is None:
        raise fields.field_error("rope.scaling.original_context_length", "a number of tokens")
    return {"rope_scaling": rope, "original_max_position_embeddings": original_max_position}


def _llama3_rope_parameters(file: GGUFFile, fields: ConfigFile) -> dict[str, Any] | None:
    """Parameters of Llama 3's RoPE scaling with the file's frequency factors; None if all are 1.

    Raises:
        ModelLoadError: if no Llama 3 scaling has these factors.
    """
    stored, size = file.read_floats("rope_freqs.weight"), _head_dim(fields)
    factor = max(stored)
    if factor == 1.0 == min(stored):
        return None
    if not all(0.0 < each < math.inf for each in stored):
        raise ModelLoadError(
            f"{file.path}: tensor 'rope_freqs.weight' has factors from {min(stored):g} to "
            f"{factor:g}, expected finite ones above 0"
        )
    theta = fields.number("rope.freq_base", 10_000.0, exclusive_low=True)
    low, high, original = LLAMA3_FREQUENCY_PARAMETERS
    expected = []
    for index in range(0, size, 2):
        turns = original / (2.0 * math.pi * theta ** (index / size))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1.0 / ((1.0 - smooth) / factor + smooth))
    close = (math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, expected, strict=False))
    if len(stored) != len(expected) or not all(close):
        raise ModelLoadError(
            f"{file.path}: tensor 'rope_freqs.weight' has other factors than Llama 3.1's of "
            f"factor {factor:g}, the only ones that are supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
