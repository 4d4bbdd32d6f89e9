"""gguf_config: converts the metadata of a GGUF file to the fields of config.json.

transformers' own conversion is not used: it drops the head size and the RoPE factors, so the
results would be wrong.
"""

from __future__ import annotations

import math
from typing import Any

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_file import GGML_TYPES, PLAIN_TYPES, GGUFFile
from asyncllm.checkpoint.gguf_vocabulary import end_token_ids
from asyncllm.checkpoint.rope_config import MAX_POSITIONS
from asyncllm.errors import ModelLoadError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""transformers' architecture by ``general.architecture``; Mistral's files also say "llama"."""

_COPIED_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_CHECKED_FIELDS = (
    "attention.key_length attention.value_length rope.dimension_count rope.scaling.type "
    "rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned vocab_size "
    "attention.sliding_window attention.causal expert_count expert_used_count"
).split()

LLAMA3_FREQUENCIES = (1.0, 4.0, 8192)
"""low_freq_factor, high_freq_factor and original_max_position_embeddings of Llama 3.1 to 3.3. A
GGUF file does not store them, only the frequency factors computed from them."""


def gguf_config(file: GGUFFile) -> ConfigFile:
    """Convert a GGUF file's metadata to the fields that ModelConfig reads.

    Raises:
        ModelLoadError: for an unsupported architecture or value, or a part of a split file.
    """
    metadata = ConfigFile(file.path, file.metadata)
    architecture = metadata.choice("general.architecture", tuple(ARCHITECTURES))
    if metadata.integer("split.count", 0, low=0, high=2**16) > 1:
        raise metadata.invalid_field(
            "split.count", "1: a file with all tensors, as llama-gguf-split --merge"
        )
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    fields = ConfigFile(file.path, values)
    for name in values:
        if name not in _COPIED_FIELDS and name not in _CHECKED_FIELDS:
            raise fields.invalid_field(
                name, f"no such value of {architecture}, which may change the model"
            )
    if fields.integer("expert_count", 0, low=0) > 0:
        raise fields.invalid_field("expert_count", "0: mixtures of experts are not supported")
    config = {there: values[here] for here, there in _COPIED_FIELDS.items() if here in values}
    config |= {
        "architectures": [ARCHITECTURES[architecture]],
        "head_dim": _head_dim(fields),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "eos_token_id": end_token_ids(file) or None,
        "dtype": _model_dtype(file),
        "rope_scaling": _rope_parameters(file, fields),
    }
    if fields.integer("attention.sliding_window", 0, low=0, high=2**31) > 0:
        raise fields.invalid_field(
            "attention.sliding_window", "0: which layers slide is not in the file"
        )
    if is_quantised(file):
        config["quantization_config"] = {"quant_method": "gguf"}
    return ConfigFile(file.path, config)


def is_quantised(file: GGUFFile) -> bool:
    return any(GGML_TYPES[t.type][0] not in PLAIN_TYPES for t in file.tensors.values())


def _head_dim(fields: ConfigFile) -> int:
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    size = fields.integer("attention.key_length", max(1, hidden // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, size) != size:
            raise fields.invalid_field(name, f"{size}, as the keys have")
    return size


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor 'token_embd.weight' is missing")
    return embedding.shape[0]


def _model_dtype(file: GGUFFile) -> str:
    """Dtype of the model: float32 if all tensors are float32; float16 if all are float32 or
    float16; else bfloat16, as in training."""
    kinds = {GGML_TYPES[tensor.type][0] for tensor in file.tensors.values()}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _rope_parameters(file: GGUFFile, fields: ConfigFile) -> dict[str, Any] | None:
    kind = fields.choice("rope.scaling.type", ("none", "linear", "yarn"), "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_parameters(file, fields)
    if kind == "none":
        return None
    rope = {"rope_type": kind, "factor": fields.number("rope.scaling.factor", low=1.0)}
    if kind == "yarn" and "rope.scaling.original_context_length" in fields:
        name = "original_max_position_embeddings"
        rope[name] = fields.integer("rope.scaling.original_context_length", high=MAX_POSITIONS)
    return rope


def _llama3_parameters(file: GGUFFile, fields: ConfigFile) -> dict[str, Any] | None:
    """Parameters of Llama 3's RoPE scaling with the file's frequency factors; None if all are 1.

    Raises:
        ModelLoadError: if no Llama 3 scaling has these factors.
    """
    found, size = file.read_floats("rope_freqs.weight"), _head_dim(fields)
    factor = max(found)
    if factor == 1.0 == min(found):
        return None
    if not all(0.0 < each < math.inf for each in found):
        raise ModelLoadError(
            f"{file.path}: tensor 'rope_freqs.weight' has factors from {min(found):g} to "
            f"{factor:g}, expected finite ones above 0"
        )
    theta = fields.number("rope.freq_base", 10_000.0, open_low=True)
    low, high, original = LLAMA3_FREQUENCIES
    expected = []
    for index in range(0, size, 2):
        turns = original / (2.0 * math.pi * theta ** (index / size))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1.0 / ((1.0 - smooth) / factor + smooth))
    close = (math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected, strict=False))
    if len(found) != len(expected) or not all(close):
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
