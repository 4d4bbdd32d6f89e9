"""GGUF files of many families: what llama.cpp's converter writes, stated a second time.

Names are those of gguf-py's own table; changes of values and metadata follow
``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests import families
from tests.gguf_files import add_tokenizer, permute

FULL_THEN_SLIDING = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]

GRANITE = families.CASES["Granite"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Dots1": ("dots1", {}),
    "Gemma2": (
        "gemma2",
        {
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
            "embedding": 0.03,  # Wider ones repeat a token, because the head is tied to them.
            "seed": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "Gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": FULL_THEN_SLIDING},
    ),
    "Glm4": ("glm4", {}),
    "Glm4Moe": ("glm4moe", {}),
    "GptOss": ("gpt-oss", {}),
    "Granite": ("granite", {}),
    "GraniteMoeHybrid-dense": (
        "granite",
        {
            "layer_types": ["attention"] * 3,
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 8,
            "shared_intermediate_size": 96,
            **GRANITE,
        },
    ),
    "Llama": ("llama", {}),
    "Llama-linear": ("llama", {"rope_parameters": families.LINEAR, "attention_bias": True}),
    "Llama-yarn": ("llama", {}),
    "Ministral3": ("mistral3", {"rope_parameters": families.MINISTRAL}),
    "Mixtral": ("llama", {}),
    "Olmo2": ("olmo2", {}),
    "Olmo3": ("olmo2", {}),
    "Olmoe": ("olmoe", {"norm_topk_prob": False}),
    "Phi3": ("phi3", {}),
    "Phi3-longrope": ("phi3", {}),
    "Phi3-sliding": ("phi3", {"sliding_window": 7}),
    "Qwen2": ("qwen2", {}),
    "Qwen2Moe": ("qwen2moe", {"norm_topk_prob": False}),
    "Qwen3": ("qwen3", {}),
    "Qwen3Moe": ("qwen3moe", {}),
    "Qwen3Next": ("qwen3next", {"norm_topk_prob": True}),
    "Qwen3_5": ("qwen35", {}),
    "Qwen3_5Moe": ("qwen35moe", {}),
    "SmolLM3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": None}),
}
"""llama.cpp's architecture, and settings of the checkpoint, by a family of ``tests.families``."""

PERMUTED = ("llama", "mistral3", "smollm3", "granite")
WITH_ONE_ADDED = ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
TILED = ("qwen35", "qwen35moe")

_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(\w+)\.weight")


def make_family(path: Path, name: str, **overrides: Any) -> Any:
    """Writes the checkpoint of a case; returns transformers' model."""
    return families.make(path, name, **CASES[name][1] | overrides)


def write_family(
    checkpoint: Path, name: str, kind: str = "F32", *, metadata: dict[str, Any] | None = None,
    parts: int = 1, dequantised: bool = False,
) -> Path:  # fmt: skip
    """Writes a case's GGUF file beside its checkpoint, and returns its path, or the first part's.

    Args:
        kind: type of all matrices whose rows it fits; others are F32.
        dequantised: store the values of ``kind`` in F32.
        metadata: values that win over the checkpoint's; None leaves one out.
    """
    architecture, config = CASES[name][0], json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    stored = dict(stored_tensors(architecture, config, tensors))
    limit = -(-len(stored) // parts) if parts > 1 else 0
    path = checkpoint / f"{name}-{'of-' * dequantised}{kind}.gguf"
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=limit)
    values = describe(architecture, config) | (metadata or {})
    for key, value in values.items():
        add = {
            list: writer.add_array, str: writer.add_string, bool: writer.add_bool,
            float: writer.add_float32, int: writer.add_uint32,
        }.get(type(value))  # fmt: skip
        if add is not None:
            add(f"{architecture}.{key}", value)
    add_tokenizer(writer, config["vocab_size"])
    for each, array in stored.items():
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        fits = array.ndim > 1 and "norm" not in each and array.shape[-1] % block == 0
        quant = gguf.GGMLQuantizationType[kind if fits else "F32"]
        blocks = gguf.quantize(np.ascontiguousarray(array), quant)
        if dequantised:
            blocks, quant = gguf.dequantize(blocks, quant), gguf.GGMLQuantizationType.F32
        writer.add_tensor(each, np.ascontiguousarray(blocks), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def stored_tensors(
    architecture: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a checkpoint as the converter stores them."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    if config["architectures"] == ["Gemma2ForCausalLM"]:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    for name, values in _converted(architecture, config, tensors):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, values
    rope = config.get("rope_parameters") or {}
    for length in ("long", "short"):
        if rope.get(f"{length}_factor"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            yield f"rope_factors_{length}.weight", factors


def _converted(
    architecture: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors by the names that gguf-py's table knows, with the converter's changes."""
    experts: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors, key=lambda each: [int(n) for n in re.findall(r"\d+", each)]):
        values = tensors[name].float().numpy()
        if expert := _EXPERT.fullmatch(name):
            merged = f"{expert[1]}.{expert[3]}.weight"
            if "block_sparse_moe" in merged:
                merged = merged.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
            experts.setdefault(merged, []).append(values)
            continue
        if architecture in PERMUTED and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            values = permute(values, config[heads])
        if ".linear_attn." in name:
            yield from _linear_attention(architecture, config, name, values)
        elif architecture in WITH_ONE_ADDED and name.endswith("norm.weight"):
            yield name, values + np.float32(1)
        elif architecture == "gpt-oss" and ".experts." in name:
            yield from _gpt_oss_experts(name, values)
        elif name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate_proj", "up_proj"), np.split(values, 2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.{part}"), half
        elif name.endswith("shared_mlp.output_linear.weight"):
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), values
        elif name.endswith("sinks"):
            yield f"{name}.weight", values
        else:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values
    for merged, found in experts.items():
        yield merged, np.stack(found)


def _gpt_oss_experts(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    stem, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
    suffix = "bias" if is_bias else "weight"
    values = values if is_bias else values.swapaxes(1, 2)
    if stem.endswith("down_proj"):
        yield f"{stem}.{suffix}", values
        return
    for first, part in enumerate(("gate_proj", "up_proj")):
        yield f"{stem.removesuffix('gate_up_proj')}{part}.{suffix}", values[:, first::2]


def _linear_attention(
    architecture: str, config: dict[str, Any], name: str, values: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    group, prefix = value_heads // heads, name.partition("linear_attn.")[0] + "linear_attn."
    leaf = name.removeprefix(prefix)

    def tiled(part: np.ndarray, width: int) -> np.ndarray:
        shape = (heads, group, width, *part.shape[1:])
        return part.reshape(shape).swapaxes(0, 1).reshape(part.shape)

    if leaf == "conv1d.weight":
        values = values[:, 0]
    if architecture in TILED:
        first = 2 * heads * key_dim if leaf in ("in_proj_qkv.weight", "conv1d.weight") else 0
        if leaf == "out_proj.weight":
            values = tiled(values.T, value_dim).T
        elif leaf != "norm.weight":
            width = value_dim if leaf.startswith(("in_proj_qkv", "in_proj_z", "conv1d")) else 1
            values = np.concatenate((values[:first], tiled(values[first:], width)))
    if leaf == "in_proj_qkvz.weight":
        sizes = np.cumsum((key_dim, key_dim, group * value_dim))
        by_head = np.split(values.reshape(heads, -1, values.shape[1]), sizes, axis=1)
        *qkv, z = (part.reshape(-1, values.shape[1]) for part in by_head)
        yield f"{prefix}in_proj_qkv.weight", np.concatenate(qkv)
        yield f"{prefix}in_proj_z.weight", z
    elif leaf == "A_log":
        yield name, -np.exp(values)
    else:
        yield name.replace("dt_bias", "dt_proj.bias"), values


def describe(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a checkpoint, without the prefix of its architecture."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        # Left out of Gemma 2's, whose base llama.cpp has in its code.
        "rope.freq_base": None if architecture == "gemma2" else float(full["rope_theta"]),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
    }
    if config.get("head_dim") and architecture not in ("phi3", "granite"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture in (*PERMUTED, "phi3", "glm4", "glm4moe", *WITH_ONE_ADDED[2:]):
        found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if full["rope_type"] in ("linear", "yarn"):
        found |= {
            "rope.scaling.type": full["rope_type"],
            "rope.scaling.factor": float(full["factor"]),
            "rope.scaling.original_context_length": full.get("original_max_position_embeddings"),
            "rope.scaling.yarn_beta_fast": full.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": full.get("beta_slow"),
        }
    if architecture == "mistral3":
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if architecture == "granite":
        found |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    if config["architectures"] == ["GraniteMoeHybridForCausalLM"]:
        found |= {
            "attention.head_count_kv": [config["num_key_value_heads"]] * 3,
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "rope.scaling.finetuned": True,
            "ssm.conv_kernel": 4, "ssm.group_count": 1, "ssm.inner_size": 128,
            "ssm.state_size": 256, "ssm.time_step_rank": 8,
        }  # fmt: skip
    if architecture in ("gemma2", "gemma3", "gpt-oss"):
        found["attention.sliding_window"] = config["sliding_window"]
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            found[cap] = config.get(cap)
    if config["architectures"] == ["Olmo3ForCausalLM"]:
        sliding = [each == "sliding_attention" for each in config["layer_types"]]
        found["attention.sliding_window"] = config["sliding_window"]
        found["attention.sliding_window_pattern"] = sliding
    if architecture == "phi3":
        found["attention.sliding_window"] = config["sliding_window"] or 0
        original = rope.get("original_max_position_embeddings")
        found["rope.scaling.original_context_length"] = original or 4096
        if original is not None and rope.get("long_factor"):
            scale = math.log(config["max_position_embeddings"] / original)
            found["rope.scaling.attn_factor"] = math.sqrt(1 + scale / math.log(original))
    return found | _describe_mixed(architecture, config)


def _describe_mixed(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """The metadata of experts and of linear attention."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    found: dict[str, Any] = {
        "expert_count": next((config[each] for each in counts if config.get(each)), None),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_feed_forward_length": None
        if architecture in ("llama", "olmoe")
        else config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if architecture == "gpt-oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture in ("dots1", "glm4moe"):
        found |= {
            "expert_shared_count": config["n_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_gating_func": 2 if architecture == "glm4moe" else None,
        }
    if "linear_num_key_heads" in config:
        value_heads = config["linear_num_value_heads"]
        found |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": value_heads,
            "ssm.inner_size": value_heads * config["linear_value_head_dim"],
            "attention.recurrent_layers": [
                each == "linear_attention" for each in config["layer_types"]
            ],
            "full_attention_interval": 4,
        }
    if architecture in TILED:
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    return found
