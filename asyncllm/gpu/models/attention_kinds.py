"""Attention of each layer of a configuration: its kind, KV group and RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.kv_cache import KVGroup
from asyncllm.gpu.kv_groups import (
    LayerCache,
    LayerGroup,
    group_layers,
    make_kv_groups,
    with_kv_groups,
)
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.models.rope import RopeSpec
from asyncllm.gpu.ops.base import Attention, AttentionShape


def attention_shape(model: ModelConfig, layer: int = 0) -> AttentionShape:
    """The attention geometry of a layer."""
    sizes = model.layer(layer)
    scale = sizes.head_dim**-0.5 if model.attention_scale is None else model.attention_scale
    return AttentionShape(
        model.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        scale,
        model.attention_softcap,
        model.sinks,
    )


def attention_kind(model: ModelConfig, layer: int) -> AttentionKind:
    """The kind of one layer's attention, without its KV group."""
    slides = bool(model.sliding_layers) and model.sliding_layers[layer]
    return AttentionKind(attention_shape(model, layer), model.sliding_window if slides else None)


def attention_layers(model: ModelConfig) -> list[int]:
    """The layers that have attention, in the order of their KV."""
    linear = model.linear_attention
    return [i for i in range(model.num_layers) if linear is None or not linear.layers[i]]


def kv_indices(model: ModelConfig) -> dict[int, int]:
    """Index of the KV cache that each attention layer reads.

    A layer that reuses an earlier layer's keys and values reads that layer's cache.
    """
    indices: dict[int, int] = {}
    for layer in attention_layers(model):
        source = model.layer(layer).kv_layer
        indices[layer] = len(set(indices.values())) if source is None else indices[source]
    return indices


def layer_groups(model: ModelConfig) -> tuple[dict[int, AttentionKind], list[LayerGroup]]:
    """Attention kind of each attention layer, and the model's KV groups."""
    indices = kv_indices(model)
    kinds = {layer: attention_kind(model, layer) for layer in indices}
    caches = [LayerCache.of(kinds[layer]) for layer in _layers_with_kv(model)]
    groups = group_layers(caches, model.max_position_embeddings)
    grouped = with_kv_groups(list(kinds.values()), list(indices.values()), groups)
    return dict(zip(kinds, grouped, strict=True)), groups


def _layers_with_kv(model: ModelConfig) -> list[int]:
    """Indices of attention layers that compute keys and values of their own."""
    return [layer for layer in attention_layers(model) if model.layer(layer).kv_layer is None]


def attention_kinds(model: ModelConfig) -> tuple[AttentionKind, ...]:
    """The distinct attention kinds of the layers."""
    return tuple(dict.fromkeys(layer_groups(model)[0].values()))


def kv_groups(
    model: ModelConfig, attention: Mapping[AttentionKind, Attention], block_size: int
) -> list[KVGroup]:
    """The KV groups, in the block layouts that the attention backends choose."""
    kinds, groups = layer_groups(model)
    layers = [kinds[layer] for layer in _layers_with_kv(model)]
    return make_kv_groups(groups, layers, attention, block_size)


def rope_specs(model: ModelConfig) -> tuple[RopeSpec, ...]:
    """The RoPE of each layer."""
    ropes = model.layer_ropes or (model.rope,) * model.num_layers
    sizes = (model.layer(layer).head_dim for layer in range(model.num_layers))
    return tuple(map(RopeSpec, ropes, sizes, (model.rotary_dim,) * model.num_layers))


class LayerAttention(NamedTuple):
    """A layer's attention op, and the indices in a StepContext that its mixer reads."""

    kind: AttentionKind
    attention: Attention
    attention_index: int
    rope_index: int
    kv_index: int


def attention_by_layer(
    model: ModelConfig, attention: Mapping[AttentionKind, Attention]
) -> dict[int, LayerAttention]:
    """LayerAttention of each attention layer; ``attention`` covers all ``attention_kinds``."""
    specs, indices, order = rope_specs(model), kv_indices(model), list(attention)
    ropes, layers = list(dict.fromkeys(specs)), {}
    for layer, kind in layer_groups(model)[0].items():
        places = order.index(kind), ropes.index(specs[layer]), indices[layer]
        layers[layer] = LayerAttention(kind, attention[kind], *places)
    return layers
