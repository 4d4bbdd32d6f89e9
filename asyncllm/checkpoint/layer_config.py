"""LayerConfig: the sizes of one layer, in models whose layers differ."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from asyncllm.checkpoint.config_file import ConfigFile


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes of one layer.

    Attributes:
        intermediate_size: intermediate size of the MLP.
        kv_layer: index of the earlier layer whose keys and values this layer reads; None if it
            has its own.
        value_is_key: whether values are the output of the key projection, before norm and RoPE.
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_layer: int | None = None
    value_is_key: bool = False


@dataclass(frozen=True, slots=True)
class PerLayerInputConfig:
    """Configuration of per-layer embeddings (Gemma 3n and 4).

    Beside the hidden states, each layer reads an embedding of its own for each token: the layer's
    slice of a second embedding, plus its slice of a projection of the first layer's input.

    Attributes:
        size: elements per token and layer.
        vocab_size: rows of the second embedding.
    """

    size: int
    vocab_size: int


def apply_head_overrides(config: ConfigFile, layers: Sequence[LayerConfig]) -> list[LayerConfig]:
    """Copy of ``layers`` with the per-layer overrides in ``per_layer_config``.

    Only ``num_key_value_heads`` and ``head_dim`` may be overridden.

    Raises:
        ModelLoadError: for a layer that does not exist, any other field, a number of key/value
            heads that does not divide the query heads, or an odd head size.
    """
    section, changed = config.section("per_layer_config"), list(layers)
    names = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
    for key in section.values:
        if not key.isdecimal() or int(key) >= len(changed):
            raise config.field_error(
                "per_layer_config", f"keys from 0 to {len(changed) - 1}, the layers"
            )
        override = section.section(key)
        if any(name not in names for name in override.values):
            raise section.field_error(key, f"an object with {' and '.join(names)} alone")
        sizes = {field: override.integer(name) for name, field in names.items() if name in override}
        changed[int(key)] = replace(changed[int(key)], **sizes)
    num_heads = config.integer("num_attention_heads")
    for index, layer in enumerate(changed):
        sizes = {"num_key_value_heads": layer.num_kv_heads, "head_dim": layer.head_dim}
        override = ConfigFile(config.path, sizes)
        if num_heads % layer.num_kv_heads:
            accepted = f"a divisor of num_attention_heads={num_heads}, in layer {index}"
            raise override.field_error("num_key_value_heads", accepted)
        if layer.head_dim % 2:
            raise override.field_error("head_dim", f"an even number, in layer {index}")
    return changed


def apply_kv_sharing(
    config: ConfigFile, layers: Sequence[LayerConfig], layer_kinds: Sequence[Hashable]
) -> tuple[LayerConfig, ...]:
    """Copy of ``layers`` in which the last ``num_kv_shared_layers`` read earlier layers' KV.

    Such a layer reads the KV of the last layer of its kind that has KV of its own. With
    ``use_double_wide_mlp`` its MLP has twice the size.

    Args:
        layer_kinds: kind of each layer, such as full or sliding attention.

    Raises:
        ModelLoadError: if no earlier layer of the same kind has KV, or the heads of the two layers
            differ.
    """
    count = config.integer("num_kv_shared_layers", 0, low=0, high=len(layers) - 1)
    first, result = len(layers) - count, list(layers)
    last = {kind: layer for layer, kind in enumerate(layer_kinds[:first])}
    width = 2 if config.boolean("use_double_wide_mlp", False) else 1
    for index in range(first, len(layers)):
        layer, source = result[index], last.get(layer_kinds[index])
        if source is None:
            accepted = (
                f"fewer: layer {index} is {layer_kinds[index]!r}, and no layer with its own KV is"
            )
            raise config.field_error("num_kv_shared_layers", accepted)
        heads = result[source].num_kv_heads, result[source].head_dim
        if (layer.num_kv_heads, layer.head_dim) != heads:
            accepted = f"heads of layer {index} that are those of layer {source}, whose KV it reads"
            raise config.field_error("per_layer_config", accepted)
        result[index] = replace(
            layer, kv_layer=source, intermediate_size=width * layer.intermediate_size
        )
    return tuple(result)
