"""model_tensors: a GGUF file's tensors under transformers' names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_file import GGUFFile, GGUFTensor
from asyncllm.errors import ModelLoadError

_MODULE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROTATED_NAME = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")

_CONFIG_TENSORS = ("rope_freqs.weight",)
"""Names of tensors that only ``gguf_config`` reads."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Storage of one tensor of the model in a GGUF file.

    Attributes:
        entry: place, shape and type of the stored rows.
        row_order: indices that put the stored rows in transformers' order; None if the orders are
            equal.
        change: function from stored to transformers' values, ``[rows, ...]`` each; None if they
            are equal.
    """

    entry: GGUFTensor
    row_order: np.ndarray | None = None
    change: Callable[[Tensor], Tensor] | None = None


def model_tensors(file: GGUFFile, config: ConfigFile) -> dict[str, StoredTensor]:
    """List the tensors of a file's model by transformers' name.

    A tensor unknown to transformers keeps its stored name.

    Args:
        config: the configuration that ``gguf_config`` returns for the file.

    Raises:
        ModelLoadError: if two tensors have one name, or rows cannot be put in order.
    """
    permuted = config.values["architectures"] == ["LlamaForCausalLM"]
    heads = {"q": config.integer("num_attention_heads")}
    heads["k"] = config.integer("num_key_value_heads", heads["q"])
    tensors: dict[str, StoredTensor] = {}
    for stored_name, entry in file.tensors.items():
        if stored_name in _CONFIG_TENSORS:
            continue
        name, order = _transformers_name(stored_name), None
        if name in tensors:
            raise ModelLoadError(f"{file.path}: tensor {stored_name!r} is there twice, as {name!r}")
        rotated = _ROTATED_NAME.fullmatch(stored_name)
        if rotated and permuted:
            order = _rotated_order(file, name, entry.shape[0], heads[rotated[1]])
        tensors[name] = StoredTensor(entry, order)
    return tensors


def _transformers_name(stored: str) -> str:
    match = _TENSOR_NAME.fullmatch(stored)
    if match is None or match[2] not in _MODULE_NAMES:
        return stored
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{_MODULE_NAMES[match[2]]}.{match[3]}"


def _rotated_order(file: GGUFFile, name: str, rows: int, heads: int) -> np.ndarray:
    """Indices that put the rows of q or k in transformers' order.

    In RoPE llama.cpp rotates adjacent pairs, transformers the two halves of a head. The converter
    to GGUF has put the rows of q and k in llama.cpp's order (``LlamaModel.permute``).
    """
    if rows % (2 * heads):
        raise ModelLoadError(
            f"{file.path}: tensor {name!r} has {rows} rows, expected a multiple of {2 * heads}, "
            "twice the number of heads"
        )
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)
