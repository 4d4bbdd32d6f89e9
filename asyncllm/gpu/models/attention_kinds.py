"""Attention of each layer of a configuration: its kind, KV group and RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.kv_groups import KVPlan
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


def attention_layers(model: ModelConfig) -> list[int]:
    """Indices of the layers that have attention, in ascending order."""
    linear = model.linear_attention
    return [i for i in range(model.num_layers) if linear is None or not linear.layers[i]]


def kv_plan(model: ModelConfig) -> KVPlan:
    """Attention kinds and KV groups, in the order of ``attention_layers``."""
    layers = attention_layers(model)
    sources = [model.layer(layer).kv_layer for layer in layers]
    slides = model.sliding_layers or (False,) * model.num_layers
    windows = [model.sliding_window if slides[layer] else None for layer in layers]
    shapes = [attention_shape(model, layer) for layer in layers]
    return KVPlan.of(
        list(map(AttentionKind, shapes, windows)),
        [None if source is None else layers.index(source) for source in sources],
        model.max_position_embeddings,
    )


def attention_kinds(model: ModelConfig) -> tuple[AttentionKind, ...]:
    """The distinct attention kinds of the layers."""
    return tuple(dict.fromkeys(kv_plan(model).kinds))


def rope_specs(model: ModelConfig) -> tuple[RopeSpec, ...]:
    """The RoPE of each layer."""
    ropes = model.layer_ropes or (model.rope,) * model.num_layers
    sizes = (model.layer(layer).head_dim for layer in range(model.num_layers))
    return tuple(map(RopeSpec, ropes, sizes, (model.rotary_dim,) * model.num_layers))


class LayerAttention(NamedTuple):
    """A layer's attention op, and the layer's indices into the lists of a StepContext."""

    kind: AttentionKind
    attention: Attention
    attention_index: int
    rope_index: int
    kv_index: int


def attention_by_layer(
    model: ModelConfig, attention: Mapping[AttentionKind, Attention]
) -> dict[int, LayerAttention]:
    """Map from the index of each attention layer to its LayerAttention.

    Args:
        attention: the Attention of each of ``attention_kinds``.
    """
    specs, plan, order = rope_specs(model), kv_plan(model), list(attention)
    ropes, layers = list(dict.fromkeys(specs)), {}
    calls = zip(attention_layers(model), plan.kinds, plan.indices, strict=True)
    for layer, kind, index in calls:
        places = order.index(kind), ropes.index(specs[layer]), index
        layers[layer] = LayerAttention(kind, attention[kind], *places)
    return layers
