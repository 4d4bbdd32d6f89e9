"""model_tensors: a GGUF file's tensors under transformers' names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asyncllm.checkpoint.gguf_config import gguf_family
from asyncllm.checkpoint.gguf_file import UNQUANTISED_TYPES, GGUFFile, GGUFTensor
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.errors import ModelLoadError

_LAYER_NAME_PATTERN = re.compile(r"blk\.(\d{1,6})\.(.+)")
_EXPERT_INDEX_PLACEHOLDER = "{}"
"""Placeholder for the expert's index in transformers' names of tensors that GGUF stacks."""

_CONFIG_TENSOR_NAMES = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
"""Names of tensors that only ``gguf_config`` reads."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Storage of one tensor of the model in a GGUF file.

    Attributes:
        entry: place, shape and type of the stored rows.
        row_order: indices of the stored rows in transformers' order; None if the order is the same.
        transform: function from stored to transformers' values, ``[rows, ...]`` each; None if they
            are equal.
    """

    entry: GGUFTensor
    row_order: np.ndarray | None = None
    transform: Callable[[Tensor], Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor after ``row_order`` is applied."""
        rows = self.entry.shape[0] if self.row_order is None else len(self.row_order)
        return (rows, *self.entry.shape[1:])


def model_tensors(file: GGUFFile, model: ModelConfig) -> dict[str, StoredTensor]:
    """List the tensors of a file's model by transformers' name.

    Experts, which GGUF stacks, are listed one by one. A tensor unknown to transformers keeps its
    stored name. Layers for multi-token prediction are left out.

    Args:
        model: the file's configuration.

    Raises:
        ModelLoadError: two tensors have the same name, or one has an unexpected shape or type.
    """
    mapper = _TensorMapper(file, model)
    tensors: dict[str, StoredTensor] = {}
    for stored_name, entry in file.tensors.items():
        layer = _LAYER_NAME_PATTERN.fullmatch(stored_name)
        if stored_name in _CONFIG_TENSOR_NAMES or (layer and int(layer[1]) >= model.num_layers):
            continue
        for name, stored in mapper.map_tensor(stored_name, layer, entry):
            if name in tensors:
                raise ModelLoadError(
                    f"{file.path}: tensor {stored_name!r} is there twice, as {name!r}"
                )
            tensors[name] = stored
    return tensors


class _TensorMapper:
    """Mapping from the tensors of one GGUF file to transformers' tensors."""

    def __init__(self, file: GGUFFile, model: ModelConfig) -> None:
        self.path, self.model = file.path, model
        self.family, self.names = gguf_family(file), _module_names(model)
        rotated = {"self_attn.q_proj": model.num_heads, "self_attn.k_proj": model.num_kv_heads}
        self.rotated_heads = rotated if self.family.permutes_heads else {}

    def map_tensor(
        self, stored_name: str, layer: re.Match[str] | None, entry: GGUFTensor
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the name and storage of each transformers tensor that a GGUF tensor contains."""
        prefix, layer_name = (
            ("", stored_name) if layer is None else (f"model.layers.{layer[1]}.", layer[2])
        )
        module, _, leaf = layer_name.rpartition(".")
        name = self.names.get(layer_name)
        if name is None and module in self.names and leaf in ("weight", "bias"):
            name = f"{self.names[module]}.{leaf}"
        linear = self.model.linear_attention
        if linear is not None and layer_name == self.family.grouped_gates_tensor:
            yield from self._split_gates(linear, f"{prefix}linear_attn.in_proj_", entry)
        elif name is None:
            yield stored_name, StoredTensor(entry)
        elif _EXPERT_INDEX_PLACEHOLDER in name:
            for index, expert in enumerate(self._split_experts(stored_name, entry)):
                yield (
                    prefix + name.replace(_EXPERT_INDEX_PLACEHOLDER, str(index)),
                    StoredTensor(expert),
                )
        else:
            stored = self._stored_tensor(stored_name, name, entry)
            if len(entry.shape) == 1 and stored.row_order is not None and not entry.is_unquantised:
                raise ModelLoadError(
                    f"{self.path}: tensor {stored_name!r} is quantised, expected a vector of type "
                    + ", ".join(UNQUANTISED_TYPES)
                )
            yield prefix + name, stored

    def _split_experts(self, stored_name: str, entry: GGUFTensor) -> Iterator[GGUFTensor]:
        experts = self.model.experts
        assert experts is not None
        count = experts.routing.num_experts
        if len(entry.shape) < 2 or entry.shape[0] != count:
            raise ModelLoadError(
                f"{self.path}: tensor {stored_name!r} has shape {entry.shape}, expected the "
                f"stacked weights of expert_count={count} experts"
            )
        size = entry.num_bytes // count
        for index in range(count):
            place = entry.start_offset + index * size
            yield replace(entry, shape=entry.shape[1:], start_offset=place, num_bytes=size)

    def _split_gates(
        self, linear: LinearAttentionConfig, prefix: str, entry: GGUFTensor
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Split a tensor of both gates, grouped by key head, into a beta and a decay tensor."""
        heads = linear.num_key_heads
        group = linear.num_value_heads // heads
        order = self._swapped_axes_order(f"{prefix}ba", entry.shape[0], heads, 2, group)
        for name, part in zip("ba", np.split(order, 2), strict=True):
            yield f"{prefix}{name}.weight", StoredTensor(entry, part)

    def _stored_tensor(self, stored_name: str, name: str, entry: GGUFTensor) -> StoredTensor:
        """Describe how a tensor is stored; ``name`` lacks the prefix of the layer."""
        module = name.rpartition(".")[0]
        if module in self.rotated_heads:
            return StoredTensor(
                entry, self._rope_row_order(name, entry, self.rotated_heads[module])
            )
        if self.model.linear_attention is not None and name.startswith("linear_attn."):
            return self._stored_linear_attention_tensor(self.model.linear_attention, name, entry)
        if (offset := self.model.norm_offset) and name.endswith("norm.weight"):
            # llama.cpp's converter has added the offset to the norm weights.
            return StoredTensor(entry, transform=lambda weights: weights.float() - offset)
        if module == "mlp.shared_expert_gate" and len(entry.shape) == 1:
            return StoredTensor(replace(entry, shape=(1, *entry.shape)))
        return StoredTensor(entry)

    def _rope_row_order(self, name: str, entry: GGUFTensor, heads: int) -> np.ndarray:
        """Indices that put the rows of q or k in transformers' order.

        RoPE rotates pairs of a head's elements: llama.cpp pairs adjacent elements, transformers
        pairs an element of the first half with one of the second. The converter to GGUF has put
        the rows of q and k in llama.cpp's order (``LlamaModel.permute``).
        """
        rows = entry.shape[0]
        if rows % (2 * heads):
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has {rows} rows, expected a multiple of "
                f"{2 * heads}, twice the number of heads"
            )
        return self._swapped_axes_order(name, rows, heads, rows // heads // 2, 2, swaps_inner=True)

    def _stored_linear_attention_tensor(
        self, linear: LinearAttentionConfig, name: str, entry: GGUFTensor
    ) -> StoredTensor:
        """Describe how a tensor of a gated delta rule is stored."""
        leaf = name.removeprefix("linear_attn.").removesuffix(".weight")
        change = self._log_of_negated if leaf == "A_log" else None
        if leaf == "conv1d" and len(entry.shape) == 2:
            entry = replace(entry, shape=(entry.shape[0], 1, entry.shape[1]))
        heads, value_heads = linear.num_key_heads, linear.num_value_heads
        if self.family.grouped_gates_tensor or leaf == "norm" or heads == value_heads:
            return StoredTensor(entry, transform=change)
        first = 2 * linear.total_key_dim if leaf in ("in_proj_qkv", "conv1d") else 0
        width = 1 if leaf in _PER_HEAD_TENSOR_NAMES else linear.value_dim
        if leaf != "out_proj":
            order = self._swapped_axes_order(
                name, entry.shape[0], value_heads // heads, heads, width, first_row=first
            )
            return StoredTensor(entry, order, change)
        columns = self._swapped_axes_order(
            name, entry.shape[-1], value_heads // heads, heads, width
        )
        chosen = torch.from_numpy(columns)
        return StoredTensor(entry, transform=lambda values: values[:, chosen])

    def _swapped_axes_order(
        self,
        name: str,
        num_rows: int,
        outer: int,
        middle: int,
        inner: int,
        *,
        first_row: int = 0,
        swaps_inner: bool = False,
    ) -> np.ndarray:
        """Row indices that swap two dimensions. Rows from ``first_row`` on are stored as ``[outer,
        middle, inner]``; the indices order them as ``[middle, outer, inner]``, or as ``[outer,
        inner, middle]`` if ``swaps_inner``. Earlier rows keep their places."""
        expected = first_row + outer * middle * inner
        if num_rows != expected:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has {num_rows} rows or columns of heads, expected "
                f"{expected}"
            )
        stored = np.arange(first_row, num_rows).reshape(outer, middle, inner)
        ordered = stored.transpose((0, 2, 1) if swaps_inner else (1, 0, 2)).reshape(-1)
        return np.concatenate((np.arange(first_row), ordered))

    def _log_of_negated(self, rates: Tensor) -> Tensor:
        if not bool((rates < 0).all()):
            raise ModelLoadError(
                f"{self.path}: tensor 'ssm_a' has rates of 0 or more, expected < 0"
            )
        return torch.log(-rates.float())


_PER_HEAD_TENSOR_NAMES = ("in_proj_b", "in_proj_a", "A_log", "dt_bias")
"""Names of those tensors of a gated delta rule that have one row per value head."""


def _module_names(model: ModelConfig) -> dict[str, str]:
    """Map GGUF's module names to transformers', both without the layer's prefix.

    Tensors that are no module's weight or bias, such as "attn_sinks.weight", have entries too.
    """
    names, mlp, experts = model.names, model.names.mlp, model.experts
    modules = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": names.input_norm,
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": names.mixer_norm or names.post_norm,
        "ffn_norm": names.post_norm,
        "post_ffw_norm": names.mlp_norm,
        "ffn_gate": f"{mlp}.{names.gate_up[0]}",
        "ffn_up": f"{mlp}.{names.gate_up[-1]}",
        "ffn_down": f"{mlp}.{names.down}",
    }
    if experts is not None:
        stored = experts.names
        modules |= {
            "ffn_gate_inp": stored.router,
            "exp_probs_b.bias": stored.correction_bias,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        }
        for kind, part in zip(("gate", "up", "down"), stored.projections, strict=True):
            modules[f"ffn_{kind}_exps"] = f"{stored.experts}.{_EXPERT_INDEX_PLACEHOLDER}.{part}"
            modules[f"ffn_{kind}_shexp"] = f"{stored.shared_expert}.{kind}_proj"
    if model.linear_attention is not None:
        modules |= {
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            "ssm_a": "linear_attn.A_log",
            "ssm_dt.bias": "linear_attn.dt_bias",
        }
    return {stored_name: name for stored_name, name in modules.items() if name is not None}
