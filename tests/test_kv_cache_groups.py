"""KV groups on the device: one allocation, a block table for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.errors import KVCacheTooSmallError
from asyncllm.gpu.batch.block_table import BlockTable
from asyncllm.gpu.cache_sizing import blocks_per_seq, min_cache_bytes, size_cache
from asyncllm.gpu.kv_cache import KVCache, KVGroup, block_bytes
from asyncllm.gpu.ops.base import AttentionShape, BlockLayout, block_layout
from tests.dummy_runner import MODEL
from tests.static_runner import CPU, kv_groups

FOUR = replace(MODEL, num_layers=4)
LAYERS = ((0, 2), (1, 3))
FLOAT = torch.float32


def test_groups_share_one_allocation() -> None:
    """Layer i of each group has the same part of it, and the same bytes of a block."""
    groups = kv_groups(FOUR, 4, *LAYERS)
    assert block_bytes(groups, FLOAT) == 2 * (2 * 4 * 2 * 8) * 4
    cache = KVCache(groups, 5, FLOAT, CPU)
    assert cache.tensor.nbytes == 5 * block_bytes(groups, FLOAT)
    assert [tuple(layer.shape) for layer in cache.layers] == [(2, 5, 4, 2, 8)] * 4
    first, second, third, fourth = (layer.data_ptr() for layer in cache.layers)
    assert first == second == cache.tensor.data_ptr()
    assert third == fourth == first + cache.tensor.nbytes // 2
    cache.tensor.fill_(1.0)
    cache.clear(np.array([3]))
    for layer in cache.layers:
        assert [bool(block.any()) for block in layer.unbind(1)] == [True, True, True, False, True]
    cache.clear(np.array([], dtype=np.int64))
    assert int(cache.tensor.count_nonzero()) == 4 * cache.tensor.numel() // 5


def test_blocks_may_hold_other_numbers_of_tokens_of_smaller_heads() -> None:
    groups = [
        KVGroup(KVCacheSpec((0,), 4), BlockLayout((2, 4, 2, 8))),
        KVGroup(KVCacheSpec((1,), 8), BlockLayout((2, 8, 1, 8))),
    ]
    cache = KVCache(groups, 3, FLOAT, CPU)
    assert [tuple(layer.shape) for layer in cache.layers] == [(2, 3, 4, 2, 8), (2, 3, 8, 1, 8)]
    cache.layers[1][:, 2] = 1.0
    assert torch.equal(cache.layers[0][:, 2], torch.ones(2, 4, 2, 8))
    assert not cache.layers[0][:, :2].any()
    assert blocks_per_seq(groups, 9, 64) == 3 + 2


@pytest.mark.parametrize(
    "other",
    [
        KVGroup(KVCacheSpec((1,), 8), BlockLayout((2, 8, 2, 8))),
        KVGroup(KVCacheSpec((1,), 4), BlockLayout((2, 4, 2, 8), order=(1, 0, 2, 3, 4))),
    ],
)
def test_groups_whose_blocks_differ_are_refused(other: KVGroup) -> None:
    groups = [KVGroup(KVCacheSpec((0,), 4), BlockLayout((2, 4, 2, 8))), other]
    with pytest.raises(ValueError, match="same size of a block and order"):
        KVCache(groups, 3, FLOAT, CPU)


def test_the_attention_chooses_the_layout() -> None:
    """The shape that ops see stays; a block is contiguous here, and may be moved in one copy."""
    shape = AttentionShape(4, 2, 8, 1.0)

    class BlocksFirst:
        def block_layout(self, block_size: int) -> BlockLayout:
            return BlockLayout((2, block_size, 2, 8), order=(1, 0, 2, 3, 4))

    attentions: list[Any] = [BlocksFirst(), object()]  # of which only the layout is asked
    chosen, default = (block_layout(attention, shape, 4) for attention in attentions)
    assert default == BlockLayout((2, 4, 2, 8))
    spec = KVCacheSpec((0, 1), 4)
    for layout, contiguous in ((chosen, True), (default, False)):
        cache = KVCache([KVGroup(spec, layout)], 6, FLOAT, CPU)
        assert tuple(cache.tensor.shape) == (2, 2, 6, 4, 2, 8)
        assert cache.layers[0][:, 3].is_contiguous() == contiguous
        cache.tensor.fill_(1.0)
        cache.clear(np.array([0, 4]))
        assert cache.layers[1].sum((0, 2, 3, 4)).tolist() == [0, 128, 128, 128, 0, 128]


@pytest.mark.parametrize(("num_blocks", "longest"), [(2, 4), (3, 4), (4, 8), (7, 12), (500, 256)])
def test_a_sequence_needs_blocks_of_every_group(num_blocks: int, longest: int) -> None:
    groups = kv_groups(FOUR, 4, *LAYERS)
    size = size_cache(
        EngineConfig(num_blocks=num_blocks),
        FOUR,
        groups,
        FLOAT,
        max_num_seqs=2,
        step_tokens=64,
        available=0,
    )
    assert (size.num_blocks, size.max_model_len) == (num_blocks + 1, longest)
    assert blocks_per_seq(groups, longest, 64) <= num_blocks


def test_the_smallest_cache_has_room_for_every_group() -> None:
    groups = kv_groups(FOUR, 4, *LAYERS)
    config = EngineConfig(max_model_len=9)
    least = min_cache_bytes(config, groups, FLOAT, 64)
    limits = {"max_num_seqs": 2, "step_tokens": 64}
    assert least == (2 * 3 + 1) * block_bytes(groups, FLOAT)
    size = size_cache(config, FOUR, groups, FLOAT, **limits, available=least)
    assert (size.num_blocks, size.max_model_len) == (7, 9)
    with pytest.raises(KVCacheTooSmallError, match="max_model_len=9 needs 6 blocks"):
        size_cache(config, FOUR, groups, FLOAT, **limits, available=least - 1)


def test_table_changes_are_taken_once() -> None:
    table = BlockTable(3, 16, 4, tracks_changes=True)
    table.append(1, [7, 8])
    table.append(1, [9])
    table.append(0, [5])
    indices, values = table.pop_changes()
    assert (indices.tolist(), values.tolist()) == ([4, 5, 6, 0], [7, 8, 9, 5])
    assert (indices.dtype, values.dtype) == (np.int64, np.int32)
    assert [len(part) for part in table.pop_changes()] == [0, 0]
    # A request that enters anew overwrites: the last value counts, wherever the index stands.
    table.num_blocks[1] = 0
    table.append(1, [3])
    table.num_blocks[1] = 0
    table.append(1, [4])
    indices, values = table.pop_changes()
    assert (indices.tolist(), values.tolist()) == ([4, 4], [4, 4])
    assert table.slot_mapping(np.array([1, 0]), np.array([2, 3])).tolist() == [18, 23]
