"""KVPlan: divides a model's layers into KV groups, each with a block table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.kv_cache import KVGroup
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.base import Attention, BlockLayout, block_layout
from asyncllm.logger import get_logger

logger = get_logger(__name__)

MAX_KV_GROUPS = 16
"""Maximum number of KV groups: each step prepares KV slots and plans attention for every group."""


class LayerCache(NamedTuple):
    """Properties of a layer's KV that decide its KV group.

    Attributes:
        num_elements: number of elements per token, K and V together.
        window: number of keys that a query sees, its own included; None for all.
    """

    num_elements: int
    window: int | None


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table.

    Attributes:
        layers: indices of the layers' caches.
        window: number of keys that a query sees, its own included; older keys are not kept. None
            means that all keys are seen and kept.
        scale: the group's tokens per block, divided by the fewest tokens per block of any group;
            blocks of all groups have equal bytes.
    """

    layers: tuple[int, ...]
    window: int | None = None
    scale: int = 1

    def spec(self, block_size: int) -> KVCacheSpec:
        """Makes the KVCacheSpec.

        Args:
            block_size: the fewest tokens per block of any group.
        """
        return KVCacheSpec(self.layers, block_size * self.scale, self.window)


def group_layers(caches: Sequence[LayerCache], max_model_len: int) -> list[LayerGroup]:
    """Groups layers by window and KV size, those without a window first.

    All groups allocate blocks of equal bytes from one pool, so they have room for equally many
    layers: usually as many as the rarest kind of layer has (the rule of vLLM's hybrid KV cache
    manager). If a kind's number of layers is not a multiple of that, part of its blocks stays
    unused: 22 + 4 layers (Gemma 3 1B) become one group of 4 and six of 3 or 4, and take 28/26 of
    the memory.

    If no layer has a window, or if blocks of different layers cannot have equal bytes, all layers
    form one group, which keeps the KV of all tokens.

    Args:
        max_model_len: tokens of the longest sequence; a window of at least that size counts as
            none.
    """
    alike: dict[LayerCache, list[int]] = {}
    for layer, cache in enumerate(caches):
        slides = cache.window is not None and cache.window < max_model_len
        key = cache if slides else cache._replace(window=None)
        alike.setdefault(key, []).append(layer)
    largest = max(cache.num_elements for cache in alike)
    slides = any(cache.window is not None for cache in alike)
    if slides and any(largest % cache.num_elements for cache in alike):
        sizes = sorted({cache.num_elements for cache in alike})
        logger.warning(
            "layers with a sliding window keep the KV of all tokens: a token's KV has %s numbers "
            "in a layer, of which the largest is no multiple of the others",
            " or ".join(map(str, sizes)),
        )
        slides = False
    if not slides:
        return [LayerGroup(tuple(range(len(caches))))]
    size = _layers_per_group([len(layers) for layers in alike.values()])
    groups = []
    for cache in sorted(alike, key=lambda cache: cache.window is not None):
        layers = alike[cache]
        count = -(-len(layers) // size)
        scale = largest // cache.num_elements
        groups += [LayerGroup(tuple(layers[i::count]), cache.window, scale) for i in range(count)]
    unused = 1 - len(caches) / (size * len(groups))
    logger.info(
        "KV cache in %d groups of %d layers, %d of them with a sliding window; %.0f%% of the "
        "memory of their blocks is unused",
        len(groups), size, sum(group.window is not None for group in groups), 100 * unused,
    )  # fmt: skip
    return groups


def _layers_per_group(num_layers_by_kind: Sequence[int]) -> int:
    """Number of layers per group, given the number of layers of each kind."""
    fewest, most = min(num_layers_by_kind), max(num_layers_by_kind)
    size = most if most < 1.25 * fewest else fewest
    max_groups = max(MAX_KV_GROUPS, len(num_layers_by_kind))
    while sum(-(-count // size) for count in num_layers_by_kind) > max_groups:
        size += 1
    return size


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Attention kinds and KV groups of a model, known before its weights are loaded.

    Attributes:
        kinds: kind of each layer's attention.
        indices: index of the KV cache that each layer reads.
        groups: KV groups of the caches; empty for a model without attention.
    """

    kinds: list[AttentionKind]
    indices: list[int]
    groups: list[LayerGroup]

    @classmethod
    def of(
        cls,
        layer_kinds: Sequence[AttentionKind],
        kv_source_layers: Sequence[int | None],
        max_model_len: int,
    ) -> KVPlan:
        """Groups the KV caches of a model's attention layers.

        A cache gets the widest window of the layers that read it.

        Args:
            layer_kinds: kind of each layer's attention, without its KV group.
            kv_source_layers: index of the earlier layer whose keys and values each layer reads;
                None if it has its own.
            max_model_len: tokens of the longest sequence.
        """
        indices: list[int] = []
        caches: list[LayerCache] = []
        for kind, source in zip(layer_kinds, kv_source_layers, strict=True):
            num_elements = 2 * kind.shape.num_kv_heads * kind.shape.head_dim
            cache, index = LayerCache(num_elements, kind.window), len(caches)
            if source is None:
                caches.append(cache)
            else:
                index = indices[source]
                windows = cache.window, caches[index].window
                window = None if None in windows else max(filter(None, windows))
                caches[index] = caches[index]._replace(window=window)
            indices.append(index)
        groups = group_layers(caches, max_model_len) if caches else []
        group_of = {cache: i for i, group in enumerate(groups) for cache in group.layers}
        pairs = zip(layer_kinds, indices, strict=True)
        kinds = [replace(kind, kv_group=group_of[index]) for kind, index in pairs]
        return cls(kinds, indices, groups)

    def kv_groups(
        self, attention: Mapping[AttentionKind, Attention], block_size: int
    ) -> list[KVGroup]:
        """Makes the KV groups, in the block layouts that the attention backends choose.

        A model without attention gets blocks of one element, which only count tokens.

        Args:
            block_size: the fewest tokens per block of any group.
        """
        if not self.groups:
            return [KVGroup(KVCacheSpec((0,), block_size), BlockLayout((1,)))]
        # If several layers read a cache, the first of them writes the cache and determines its
        # layout.
        writers = [self.kinds[self.indices.index(cache)] for cache in sorted(set(self.indices))]
        made = []
        for group in self.groups:
            spec = group.spec(block_size)
            layouts = tuple(
                block_layout(attention[writers[cache]], writers[cache].shape, spec.block_size)
                for cache in group.layers
            )
            largest = max(layouts, key=lambda layout: layout.num_elements)
            made.append(KVGroup(spec, largest, layouts if len(set(layouts)) > 1 else ()))
        return made
