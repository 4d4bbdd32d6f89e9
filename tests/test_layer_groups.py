"""Grouping of layers, shared memory and block tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.errors import KVCacheTooSmallError
from asyncllm.gpu.batch.block_table import BlockTable
from asyncllm.gpu.cache_sizing import blocks_per_seq, size_cache
from asyncllm.gpu.kv_cache import KVCache, KVGroup, block_bytes
from asyncllm.gpu.kv_groups import MAX_KV_GROUPS, KVPlan, LayerCache, LayerGroup, group_layers
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_plan
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.base import AttentionShape, BlockLayout, block_layout
from asyncllm.gpu.ops.torch_attention import TorchAttention
from tests.dummy_runner import MODEL
from tests.static_runner import CPU

CONTEXT = 4096
FULL, NEAR = LayerCache(64, None), LayerCache(64, 512)


def sizes(counts: dict[LayerCache, int]) -> list[tuple[int | None, int]]:
    """Window and number of layers of each group; every layer is in one."""
    caches = [cache for cache, count in counts.items() for _ in range(count)]
    groups = group_layers(caches, CONTEXT)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(caches)))
    for group in groups:
        assert {caches[layer].window for layer in group.layers} == {group.window} or len(groups) < 2
    return [(group.window, len(group.layers)) for group in groups]


@pytest.mark.parametrize(
    ("near", "full", "groups"),
    [
        (0, 4, [(None, 4)]),
        (4, 0, [(512, 4)]),
        (12, 12, [(None, 12), (512, 12)]),  # gpt-oss
        (25, 5, [(None, 5)] + [(512, 5)] * 5),  # Gemma 4
        (22, 4, [(None, 4)] + [(512, 4)] * 4 + [(512, 3)] * 2),  # Gemma 3 1B
        (6, 5, [(None, 5), (512, 6)]),
        (7, 5, [(None, 5), (512, 4), (512, 3)]),
        (5, 6, [(None, 6), (512, 5)]),
    ],
)
def test_groups_have_as_many_layers_as_the_rarest_kind(near, full, groups):
    assert sizes({NEAR: near, FULL: full}) == groups


def test_number_of_groups_is_bounded():
    assert sizes({FULL: 1, NEAR: 15}) == [(None, 1)] + [(512, 1)] * 15
    assert len(sizes({FULL: 1, NEAR: 15})) == MAX_KV_GROUPS
    assert sizes({FULL: 1, NEAR: 47}) == [(None, 1)] + [(512, 4)] * 11 + [(512, 3)]


def test_window_as_long_as_context_is_full_attention():
    caches = [FULL, LayerCache(64, CONTEXT), LayerCache(64, CONTEXT + 1)]
    assert group_layers(caches, CONTEXT) == [LayerGroup((0, 1, 2))]


def test_smaller_heads_have_more_tokens_in_a_block():
    groups = group_layers([LayerCache(128, None), NEAR], CONTEXT)
    assert groups == [LayerGroup((0,)), LayerGroup((1,), 512, 2)]
    assert [group.spec(16) for group in groups] == [
        KVCacheSpec((0,), 16),
        KVCacheSpec((1,), 32, 512),
    ]


def test_layers_with_unequal_blocks_stay_in_one_group(caplog):
    assert group_layers([LayerCache(96, None), NEAR], CONTEXT) == [LayerGroup((0, 1))]
    assert "a token's KV has 64 or 96 numbers in a layer" in caplog.text
    # Without a window there is nothing to give back.
    assert group_layers([LayerCache(128, None), FULL], CONTEXT) == [LayerGroup((0, 1))]


def test_incomplete_group_leaves_block_parts_unused():
    layout = BlockLayout((2, 4, 2, 8))
    groups = [
        KVGroup(KVCacheSpec((1, 3), 4), layout),
        KVGroup(KVCacheSpec((0,), 4, 5), layout),
        KVGroup(KVCacheSpec((2,), 4, 5), layout),
    ]
    cache = KVCache(groups, 3, torch.float32, CPU)
    assert cache.tensor.nbytes == 3 * block_bytes(groups, torch.float32) == 3 * 2 * 128 * 4
    first, second, third, fourth = (layer.data_ptr() for layer in cache.layers)
    assert first == second == third == cache.tensor.data_ptr()
    assert fourth == first + cache.tensor.nbytes // 2
    cache.tensor.fill_(1.0)
    cache.clear(np.array([2]))
    for layer in cache.layers:
        assert layer.sum((0, 2, 3, 4)).tolist() == [128, 128, 0]


def test_groups_of_layers_with_other_heads_share_blocks():
    shapes = AttentionShape(4, 2, 16, 1.0), AttentionShape(4, 2, 8, 1.0)
    kinds = [AttentionKind(shapes[0]), AttentionKind(shapes[1], 512, kv_group=1)]
    attention = {kind: TorchAttention(kind.shape, torch.float32) for kind in kinds}
    groups = KVPlan.of(kinds, [None, None], CONTEXT).kv_groups(attention, 4)
    cache = KVCache(groups, 3, torch.float32, CPU)
    assert [tuple(one.shape) for one in cache.layers] == [(2, 3, 4, 2, 16), (2, 3, 8, 2, 8)]
    cache.layers[1][:, 2] = 1.0
    assert torch.equal(cache.layers[0][:, 2], torch.ones(2, 4, 2, 16))
    assert not cache.layers[0][:, :2].any()
    assert blocks_per_seq(groups, 9, 64) == 3 + 2
    cache.clear(np.array([], dtype=np.int64))
    assert int(cache.tensor.count_nonzero()) == cache.tensor.numel() // 3


@pytest.mark.parametrize("layouts_differ", [False, True])
def test_blocks_are_read_before_the_first_is_written(layouts_differ):
    layout = BlockLayout((2, 4, 2, 8))
    layouts = (layout, BlockLayout((2, 4, 1, 8))) if layouts_differ else ()
    cache = KVCache([KVGroup(KVCacheSpec((0, 1), 4), layout, layouts)], 5, torch.float32, CPU)
    for layer in cache.layers:
        layer.copy_(torch.arange(5.0).view(1, 5, 1, 1, 1).expand_as(layer))
    cache.copy_blocks([(1, 3), (4, 1), (1, 2)])
    for layer in cache.layers:
        assert torch.equal(
            layer, torch.tensor([0.0, 4, 1, 1, 4]).view(1, 5, 1, 1, 1).expand_as(layer)
        )


@pytest.mark.parametrize(
    "other",
    [
        KVGroup(KVCacheSpec((1,), 8), BlockLayout((2, 8, 2, 8))),
        KVGroup(KVCacheSpec((1,), 4), BlockLayout((2, 4, 2, 8), order=(1, 0, 2, 3, 4))),
    ],
)
def test_groups_whose_blocks_differ_are_refused(other):
    groups = [KVGroup(KVCacheSpec((0,), 4), BlockLayout((2, 4, 2, 8))), other]
    with pytest.raises(ValueError, match="same size of a block and order"):
        KVCache(groups, 3, torch.float32, CPU)


def test_the_attention_chooses_the_layout():
    """The shape that ops see stays; a block is contiguous here, and may be moved in one copy."""
    shape = AttentionShape(4, 2, 8, 1.0)

    class BlocksFirst:
        def block_layout(self, block_size: int) -> BlockLayout:
            return BlockLayout((2, block_size, 2, 8), order=(1, 0, 2, 3, 4))

    attentions = [BlocksFirst(), object()]  # of which only the layout is asked
    chosen, default = (block_layout(attention, shape, 4) for attention in attentions)
    assert default == BlockLayout((2, 4, 2, 8))
    spec = KVCacheSpec((0, 1), 4)
    for layout, contiguous in ((chosen, True), (default, False)):
        cache = KVCache([KVGroup(spec, layout)], 6, torch.float32, CPU)
        assert tuple(cache.tensor.shape) == (2, 2, 6, 4, 2, 8)
        assert cache.layers[0][:, 3].is_contiguous() == contiguous
        cache.tensor.fill_(1.0)
        cache.clear(np.array([0, 4]))
        assert cache.layers[1].sum((0, 2, 3, 4)).tolist() == [0, 128, 128, 128, 0, 128]


def test_table_changes_are_taken_once():
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


SLIDING = replace(
    MODEL,
    num_layers=6,
    sliding_window=9,
    sliding_layers=(True, True, False, True, True, True),
    max_position_embeddings=200,
)


def groups_of(model):
    kinds = attention_kinds(model)
    attention = {kind: TorchAttention(kind.shape, torch.float32) for kind in kinds}
    return kv_plan(model).kv_groups(attention, 4)


def sized(config, step_tokens=6, available=0):
    return size_cache(
        config,
        SLIDING,
        groups_of(SLIDING),
        torch.float32,
        max_num_seqs=2,
        step_tokens=step_tokens,
        available_bytes=available,
    )


def test_native_model_groups_window_layers_by_five():
    groups = groups_of(SLIDING)
    assert [(g.spec.layers, g.spec.window) for g in groups] == [
        ((2,), None), ((0,), 9), ((1,), 9), ((3,), 9), ((4,), 9), ((5,), 9),
    ]  # fmt: skip


@pytest.mark.parametrize("num_blocks", [6, 12, 17, 24, 29, 30, 31, 50, 74, 75, 76])
def test_longest_sequence_fits_all_groups(num_blocks):
    groups, found = groups_of(SLIDING), sized(EngineConfig(num_blocks=num_blocks)).max_model_len
    assert blocks_per_seq(groups, found, 6) <= num_blocks
    assert found == 200 or blocks_per_seq(groups, found + 1, 6) > num_blocks


def test_a_larger_step_takes_more_of_a_window():
    # 14 keys of a step of 6 lie in 5 blocks at most, 23 of one of 15 in 7.
    assert sized(EngineConfig(num_blocks=50 + 5 * 5)).max_model_len == 200
    assert sized(EngineConfig(num_blocks=50 + 5 * 5), 15).max_model_len == 160
    assert sized(EngineConfig(num_blocks=50 + 5 * 7), 15).max_model_len == 200


def test_too_small_cache_error_has_need_per_group():
    with pytest.raises(KVCacheTooSmallError) as caught:
        sized(EngineConfig(num_blocks=74, max_model_len=200))
    message = str(caught.value)
    assert "max_model_len=200 needs 75 blocks, 75 (50 of all tokens + 5 of its window" in message
    assert "raise num_blocks to at least 75, or lower max_model_len or max_num_batched_tokens" in (
        message
    )
    with pytest.raises(KVCacheTooSmallError, match="the smallest needs one block of every KV gr"):
        sized(EngineConfig(num_blocks=5))
