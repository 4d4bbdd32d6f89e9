"""KVCache: the keys and values of all layers in one allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.errors import KVCacheTooSmallError
from asyncllm.gpu.h2d import copy_to_device, lazy_zeros
from asyncllm.gpu.ops.base import BlockLayout
from asyncllm.gpu.state_cache import StateCache


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A KV group: its KVCacheSpec and the block layouts of its layers.

    Attributes:
        layout: block layout of all layers; the largest one if layers differ.
        layouts: block layout of each layer if layers differ; else empty. A block takes the same
            bytes in every layer, and smaller layouts leave the rest unused.
    """

    spec: KVCacheSpec
    layout: BlockLayout
    layouts: tuple[BlockLayout, ...] = ()

    def views(self, memory: Tensor, num_blocks: int) -> Sequence[Tensor]:
        """Views ``memory [layers, size]`` as one cache per layer."""
        if not self.layouts:
            return list(self.layout.view(memory[: len(self.spec.layers)], num_blocks))
        return [
            layout.view(memory[i : i + 1, : num_blocks * layout.num_elements], num_blocks)[0]
            for i, layout in enumerate(self.layouts)
        ]


class KVCache:
    """Keys and values of all layers: one allocation, viewed as a tensor per layer.

    All KV groups allocate from the same pool of blocks: layer i of each group lies in part i of the
    allocation, and a block belongs to one group at a time. A group with fewer layers than another
    leaves the last parts of its blocks unused.

    The part is the first dimension because on a CPU torch gathers blocks 40 times faster from a
    contiguous layer than from a strided layer.

    On a CPU the operating system zeroes the allocation page by page as it is first touched, so that
    an unused cache costs no memory.

    Attributes:
        tensor: the whole cache, ``[parts, ...]`` in the layout of the first group; ``[parts,
            size]`` if layouts differ by layer.
        layers: a view per layer, see BlockLayout.
        states: recurrent states; None for a model without recurrent layers.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateCache | None = None,
    ) -> None:
        self.states = states
        depth = _layers_per_block(groups)
        size = num_blocks * block_bytes(groups, dtype) // (depth * dtype.itemsize)
        try:
            memory = lazy_zeros((depth, size), dtype, device)
        except (MemoryError, ValueError) as error:
            raise KVCacheTooSmallError(
                f"a KV cache of {depth * size * dtype.itemsize} bytes cannot be allocated: lower "
                "kv_cache_memory or num_blocks"
            ) from error
        self._layouts_differ = bool(groups[0].layouts)
        if len(groups) > 1 and any(group.layouts for group in groups):
            raise ValueError("layers of different layouts: expected one KV group of all of them")
        views = [group.views(memory, num_blocks) for group in groups]
        self.tensor = memory if self._layouts_differ else groups[0].layout.view(memory, num_blocks)
        parts = {
            layer: part
            for group, view in zip(groups, views, strict=True)
            for layer, part in zip(group.spec.layers, view, strict=True)
        }
        self.layers: list[Tensor] = [parts[layer] for layer in sorted(parts)]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks; all are read before the first is written.

        Args:
            pairs: source and target block ids.
        """
        block_ids = np.array([*zip(*pairs, strict=True)], dtype=np.int64)
        sources, targets = copy_to_device(block_ids, self.tensor.device)
        if not self._layouts_differ:
            self.tensor.index_copy_(2, targets, self.tensor.index_select(2, sources))
            return
        for layer in self.layers:
            layer.index_copy_(1, targets, layer.index_select(1, sources))

    def block_arrays(self) -> np.ndarray:
        """Layout of the keys and of the values of each layer, for native code: ``[n, 3]`` int64,
        address of block 0, stride between blocks and size of a block, in bytes."""
        return np.array(
            [
                (half.data_ptr(), half.stride(0) * half.itemsize, half[0].nbytes)
                for layer in self.layers
                for half in layer
            ],
            dtype=np.int64,
        )

    def clear(self, block_ids: np.ndarray) -> None:
        """Zeroes blocks before a new owner writes them.

        Attention in plain torch reads whole blocks and gives positions beyond a sequence the weight
        0, and 0 times a NaN that a failed request left there would be NaN.
        """
        index = copy_to_device(block_ids, self.tensor.device)
        if not self._layouts_differ:
            self.tensor.index_fill_(2, index, 0.0)
            return
        for layer in self.layers:
            layer.index_fill_(1, index, 0.0)


def block_bytes(groups: Sequence[KVGroup], dtype: torch.dtype) -> int:
    """Bytes of one block, over all layers of the group that it belongs to.

    Raises:
        ValueError: blocks of different groups differ in size or outer dimensions.
    """
    sizes = {group.layout.num_elements for group in groups}
    if len(sizes) > 1 or len({group.layout.order[:2] for group in groups}) > 1:
        raise ValueError(
            f"KV groups {groups}: expected the same size of a block and order of its outer "
            "dimensions in all of them"
        )
    return _layers_per_block(groups) * sizes.pop() * dtype.itemsize


def _layers_per_block(groups: Sequence[KVGroup]) -> int:
    """Number of layers for which a block has room."""
    return max(len(group.spec.layers) for group in groups)
