"""GGUF files of tiny models, written by gguf-py as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from benchmarks.peer_gguf import gguf_name

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """convert_hf_to_gguf.py: ``LlamaModel.permute``."""
    shape = weights.shape
    return (
        weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )


def write_gguf(
    path: Path,
    checkpoint: Path,
    tensors: dict[str, torch.Tensor],
    kind: str | dict[str, str],
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of ``ARCHITECTURES``; ``kind`` is the type of its matrices, or that of
    some by a part of their stored name, "" for the others; ``raw`` are the bytes of some. Returns
    what they mean in float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    name = config["architectures"][0]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[name])
    add_metadata(writer, config, metadata or {})
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    meant: dict[str, torch.Tensor] = {}
    for full_name, tensor in tensors.items():
        stored, values = gguf_name(full_name), tensor.float().numpy()
        if full_name in (raw or {}):
            blocks, quant = raw[full_name]
            writer.add_tensor(stored, blocks, raw_dtype=quant)
            continue
        wanted = kind if isinstance(kind, str) else kind[next(k for k in kind if k in stored)]
        quant = gguf.GGMLQuantizationType[wanted if tensor.dim() > 1 else "F32"]
        rotated = name == "LlamaForCausalLM" and (".attn_q." in stored or ".attn_k." in stored)
        number = heads if ".attn_q." in stored else groups
        blocks = gguf.quantize(permute(values, number) if rotated else values, quant)
        writer.add_tensor(stored, blocks, raw_dtype=quant)
        meant[full_name] = torch.from_numpy(
            np.array(gguf.dequantize(gguf.quantize(values, quant), quant))
        ).view(tensor.shape)
    for stored, values in (extra or {}).items():
        writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], metadata: dict[str, Any]) -> None:
    """The sizes of ``config`` and a tokenizer; then ``metadata``, which wins."""
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    add_tokenizer(writer, config["vocab_size"])
    for key, value in metadata.items():
        # The writer refuses a key that it has already.
        writer.kv_data[0].pop(key, None)
        kinds: dict[type, Any] = {
            list: writer.add_array, str: writer.add_string, bool: writer.add_bool,
        }  # fmt: skip
        kinds.get(type(value), writer.add_uint32)(key, value)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """A byte-level vocabulary with two special tokens at its end and one merge."""
    letters = [chr(33 + i) if i < 94 else chr(0x100 + i) for i in range(vocab_size - 4)]
    tokens = [*letters, "Ġ", "ab", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (vocab_size - 2) + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(vocab_size - 1)
    writer.add_chat_template(TEMPLATE)
