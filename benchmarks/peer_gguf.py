"""Writes a Qwen3 or Qwen3.5 checkpoint as GGUF, without a vocabulary: prompts are token ids.

    python -m benchmarks.peer_gguf CHECKPOINT KIND TARGET

Runs in llama.cpp's environment, which has gguf and numpy and need not have torch. KIND is bfloat16,
float32, q8_0, q4_0 or q4_k_m, a mixture of types that llama.cpp itself quantises. Norms are in
float32 in each of them, as llama.cpp expects, and so are the convolutions, biases and decays of
gated delta rules.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

HYBRID_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}


def gguf_name(name: str, names: Mapping[str, str] = NAMES) -> str:
    """llama.cpp's name of a parameter of transformers."""
    if name.endswith(("dt_bias", "A_log")):
        # The parameters of gated delta rules that are no module's weight or bias.
        _, _, layer, _, leaf = name.split(".")
        return f"blk.{layer}.{'ssm_a' if leaf == 'A_log' else 'ssm_dt.bias'}"
    module, _, leaf = name.rpartition(".")
    if module in names:
        return f"{names[module]}.{leaf}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{leaf}"


def as_stored(name: str, values: np.ndarray) -> np.ndarray:
    """A tensor of Qwen3.5 as llama.cpp has it: its norms' weights with the 1 that is added to them,
    and the rate of decay in place of its logarithm."""
    if name.endswith("A_log"):
        return -np.exp(values)
    if name.endswith("conv1d.weight"):
        return values[:, 0]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values + 1
    return values


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a safetensors file, of bfloat16 as float32."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (size,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":
                values = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
                values = values.view(np.float32)
            else:
                values = np.frombuffer(data[begin:end], np.float32)
            yield name, values.reshape(entry["shape"])


def write(checkpoint: Path, kind: str, target: Path) -> None:
    import gguf  # pyright: ignore[reportMissingImports]

    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    quant = {
        "bfloat16": gguf.GGMLQuantizationType.BF16,
        "float32": gguf.GGMLQuantizationType.F32,
        "q8_0": gguf.GGMLQuantizationType.Q8_0,
        "q4_0": gguf.GGMLQuantizationType.Q4_0,
    }[kind]
    partial = target.with_suffix(".partial")
    is_hybrid = config["model_type"] == "qwen3_5_text"
    writer = gguf.GGUFWriter(partial, "qwen35" if is_hybrid else "qwen3")
    rope = config.get("rope_parameters") or {}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if is_hybrid:
        add_gated_delta(writer, config)
    names = HYBRID_NAMES if is_hybrid else NAMES
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, values in read_tensors(file):
            own = as_stored(name, values) if is_hybrid else values
            is_wide = own.ndim == 1 or "conv1d" in name
            stored = gguf.GGMLQuantizationType.F32 if is_wide else quant
            packed = gguf.quants.quantize(np.ascontiguousarray(own), stored)
            writer.add_tensor(gguf_name(name, names), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def add_gated_delta(writer: Any, config: dict[str, Any]) -> None:
    """Sizes of gated delta rules, and the part of a head that RoPE turns.

    Raises:
        ValueError: key and value heads that differ in number or size; llama.cpp has their rows in
            another order.
    """
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    if (heads, size) != (config["linear_num_key_heads"], config["linear_key_head_dim"]):
        raise ValueError("linear_num_key_heads: expected as many as value heads, of their size")
    turned = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    writer.add_rope_dimension_count(turned)
    # Of text all parts have the same positions.
    writer.add_rope_dimension_sections([turned // 2, 0, 0, 0])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(heads * size)
    writer.add_ssm_state_size(size)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(heads)


def quantise(source: Path, target: Path) -> None:
    """Quantises a GGUF file to llama.cpp's Q4_K_M.

    Raises:
        RuntimeError: llama.cpp refuses the file.
    """
    import llama_cpp  # pyright: ignore[reportMissingImports]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    partial = target.with_suffix(".partial")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), params)
    if status:
        raise RuntimeError(f"llama_model_quantize: status {status}")
    partial.rename(target)


def main() -> None:
    checkpoint, kind, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if kind != "q4_k_m":
        write(checkpoint, kind, target)
        return
    plain = target.with_suffix(".plain")
    write(checkpoint, "bfloat16", plain)
    quantise(plain, target)
    plain.unlink()


if __name__ == "__main__":
    main()
