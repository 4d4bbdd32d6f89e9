"""Writes a Qwen3 checkpoint as GGUF, without a vocabulary: prompts are token ids.

    python -m benchmarks.peer_gguf CHECKPOINT KIND TARGET

Runs in llama.cpp's environment, which has gguf and numpy and need not have torch. KIND is bfloat16,
float32, q8_0 or q4_0; norms are in float32 in each of them, as llama.cpp expects.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
from collections.abc import Iterator
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


def gguf_name(name: str) -> str:
    """llama.cpp's name of a parameter of transformers."""
    module, _, leaf = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{leaf}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{leaf}"


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
    writer = gguf.GGUFWriter(partial, "qwen3")
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
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, values in read_tensors(file):
            stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else quant
            packed = gguf.quants.quantize(values, stored)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
