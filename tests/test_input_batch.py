"""The persistent batch against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.core.batch import SlotAssignment, StepBatch
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.step_buffer import step_inputs
from asyncllm.gpu.batch.step_inputs import RowArrays, StepInputs
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.ops import torch_attention
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.torch_attention import (
    ROW_GROUP_OVERHEAD_TOKENS,
    TorchAttention,
    split_by_length,
)
from asyncllm.sampling_params import SamplingParams
from tests.hypothesis_settings import examples

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


PARAMS = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)


def assignment(req_index: int, tokens: list[int], blocks: list[int], prompt: int) -> SlotAssignment:
    return SlotAssignment(req_index, f"r{req_index}", tokens, prompt, (blocks,), PARAMS)


def make_inputs(max_num_seqs: int, max_model_len: int, *block_sizes: int) -> InputBatch:
    """With a KV group per block size."""
    groups = [KVCacheSpec((layer,), size) for layer, size in enumerate(block_sizes)]
    return InputBatch(max_num_seqs, max_model_len, groups)


def prepare(inputs: InputBatch, batch: StepBatch) -> StepInputs:
    return step_inputs(batch, inputs, CPU)


def rows_of(step: StepInputs) -> RowArrays:
    assert step.host is not None
    return step.host


def blocks_of(step: StepInputs, row: int) -> np.ndarray:
    """The blocks of a row in the only KV group."""
    return step.groups[0].host_table[rows_of(step).req_indices[row]]


def make_batch(rows: list[tuple[int, int, int, bool]], **changes) -> StepBatch:
    """Rows of (slot, start, count, samples)."""
    rows = sorted(rows, key=lambda row: not (row[2] == 1 and row[3]))
    return StepBatch(
        0,
        req_indices=[row[0] for row in rows],
        starts=[row[1] for row in rows],
        counts=[row[2] for row in rows],
        samples=[row[3] for row in rows],
        num_decodes=sum(row[2] == 1 and row[3] for row in rows),
        num_tokens=sum(row[2] for row in rows),
        **changes,
    )


@examples(80)
@given(st.data())
def test_prepare_matches_a_plain_loop(data):
    block_size = data.draw(st.sampled_from([1, 3, 16]))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    inputs = make_inputs(8, 64, block_size)
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    req_indices = draw.permutation(8)[: len(lengths)].tolist()
    free = draw.permutation(np.arange(1, 400)).tolist()
    held, tokens, rows, entering = {}, {}, [], []
    for req_index, length in zip(req_indices, lengths, strict=True):
        tokens[req_index] = draw.integers(0, 1000, length).tolist()
        held[req_index] = [free.pop() for _ in range(-(-length // block_size))]
        start = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - start))
        rows.append((req_index, start, count, start + count == length))
        entering.append(assignment(req_index, tokens[req_index], held[req_index], length))
    batch = make_batch(rows, assignments=entering)
    inputs.apply_step_changes(batch)
    step = prepare(inputs, batch)
    ids, positions, mapping, last = [], [], [], []
    for req_index, start, count, samples in zip(
        batch.req_indices, batch.starts, batch.counts, batch.samples, strict=True
    ):
        for position in range(start, start + count):
            ids.append(tokens[req_index][position])
            positions.append(position)
            block = held[req_index][position // block_size]
            mapping.append(block * block_size + position % block_size)
        if samples:
            last.append(len(ids) - 1)
    assert step.token_ids.tolist() == ids
    assert step.positions.tolist() == positions
    assert step.groups[0].slot_mapping.tolist() == mapping
    assert step.num_logits == len(last)
    if step.output_indices is None:
        assert last == list(range(len(ids)))
    else:
        assert step.output_indices.tolist() == last
    assert rows_of(step).query_start_loc.tolist() == [0, *np.cumsum(batch.counts).tolist()]
    assert rows_of(step).seq_lens.tolist() == [
        s + c for s, c in zip(batch.starts, batch.counts, strict=True)
    ]
    for row, req_index in enumerate(batch.req_indices):
        blocks = held[req_index]
        assert blocks_of(step, row)[: len(blocks)].tolist() == blocks
        used = -(-int(step.seq_lens[row]) // block_size)
        assert step.row_block_tables(0)[row, :used].tolist() == blocks[:used]


def test_released_slots_start_anew_and_blocks_are_appended():
    inputs = make_inputs(2, 64, 4)
    first = make_batch([(1, 0, 6, True)], assignments=[assignment(1, [5] * 6, [9, 8], 6)])
    # The second block is filled to half: what an earlier owner left there has to go.
    inputs.apply_step_changes(first)
    assert inputs.unfilled_blocks(first).tolist() == [8]
    inputs.token_ids[1, 6] = 77
    grown = make_batch([(1, 6, 3, True)], new_blocks=[(1, ([3],))])
    inputs.apply_step_changes(grown)
    assert inputs.unfilled_blocks(grown).tolist() == [3]
    assert inputs.tables[0].table[1, :3].tolist() == [9, 8, 3]
    assert prepare(inputs, make_batch([(1, 6, 1, True)])).token_ids.tolist() == [77]
    assert inputs.output_token_ids(1, 7).tolist() == [77]
    again = make_batch(
        [(1, 8, 3, True)],
        released_indices=[1],
        assignments=[assignment(1, [6] * 11, [2, 4, 7], 11)],
    )
    # Two blocks come from the prefix cache and belong to others as well.
    inputs.apply_step_changes(again)
    assert inputs.unfilled_blocks(again).tolist() == [7]
    assert inputs.tables[0].table[1, :3].tolist() == [2, 4, 7]
    assert inputs.tables[0].num_blocks.tolist() == [0, 3]
    assert prepare(inputs, again).groups[0].slot_mapping.tolist() == [28, 29, 30]


@examples(200)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64), st.sampled_from([100, 4096, 10**9]))
def test_groups_cover_every_row_once_with_bounded_padding(lengths, max_tokens):
    groups = split_by_length(np.array(lengths), max_tokens)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        members = np.array(lengths)[group]
        assert members.max() * len(members) - members.sum() <= ROW_GROUP_OVERHEAD_TOKENS
        assert len(members) == 1 or members.max() * len(members) <= max_tokens


def plain_attention(
    q: torch.Tensor, cache: torch.Tensor, step: StepInputs, scale: float, window: int | None
) -> torch.Tensor:
    """Token by token and head by head, in float64."""
    num_heads, num_kv_heads = q.shape[1], cache.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(step.num_rows):
        used = -(-int(step.seq_lens[row]) // cache.shape[2])
        blocks = torch.from_numpy(blocks_of(step, row)[:used].astype(np.int64))
        keys, values = cache[:, blocks].double().flatten(1, 2)
        first = int(step.query_start_loc[row])
        for index in range(first, int(step.query_start_loc[row + 1])):
            position = int(rows_of(step).starts[row]) + index - first
            low = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                shared = head // (num_heads // num_kv_heads)
                scores = keys[low : position + 1, shared] @ q[index, head].double() * scale
                weights = scores.softmax(0)
                out[index, head] = weights @ values[low : position + 1, shared]
    return out.flatten(1)


@examples(40)
@given(st.data())
def test_paged_attention_matches_the_plain_one(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    kv_heads, group = data.draw(st.sampled_from([(1, 4), (2, 1), (2, 3)]))
    window = data.draw(st.sampled_from([None, 1, 5, 1000]))
    head_dim, num_blocks = 8, 120
    inputs = make_inputs(8, 96, block_size)
    free = torch.randperm(num_blocks - 1, generator=generator).add(1).tolist()
    rows, entering = [], []
    for req_index in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(1, 90 if block_size > 1 else 20))
        count = data.draw(st.sampled_from([1, 1, min(3, length), length]))
        blocks = [free.pop() for _ in range(-(-length // block_size))]
        rows.append((req_index, length - count, count, True))
        entering.append(assignment(req_index, [0] * length, blocks, length))
    batch = make_batch(rows, assignments=entering)
    inputs.apply_step_changes(batch)
    step = prepare(inputs, batch)
    shape = (2, num_blocks, block_size, kv_heads, head_dim)
    cache = torch.randn(shape, generator=generator)
    kv = torch.randn(2, step.num_tokens, kv_heads, head_dim, generator=generator)
    cache.view(2, -1, kv_heads, head_dim)[:, step.groups[0].slot_mapping] = kv
    q = torch.randn(step.num_tokens, kv_heads * group, head_dim, generator=generator)
    scale = head_dim**-0.5
    attention = TorchAttention(
        AttentionShape(kv_heads * group, kv_heads, head_dim, scale), torch.float32
    )
    found = attention(q, kv[0], kv[1], cache, attention.plan(step, window, 0))
    expected = plain_attention(q, cache, step, scale, window)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_plan_is_uploaded_without_waiting_for_the_device(monkeypatch):
    """A copy from memory that is not pinned would wait for the step before."""
    uploaded = []

    def noting(array, device):
        tensor = copy_to_device(array, device)
        uploaded.append(tensor.untyped_storage().data_ptr())
        return tensor

    monkeypatch.setattr(torch_attention, "copy_to_device", noting)
    inputs = make_inputs(8, 96, 4)
    # Decodes, a chunk behind others, and prompts of unequal and of equal length.
    rows = [(0, 9, 1, True), (1, 30, 1, True), (2, 20, 7, True), (3, 0, 5, True), (4, 8, 3, True)]
    rows += [(5, 8, 3, True)]
    entering = [
        assignment(
            req_index,
            [0] * (start + count),
            list(range(1 + 10 * req_index, 11 + 10 * req_index)),
            1,
        )
        for req_index, start, count, _ in rows
    ]
    batch = make_batch(rows, assignments=entering)
    inputs.apply_step_changes(batch)
    step = prepare(inputs, batch)
    attention = TorchAttention(AttentionShape(2, 1, 8, 1.0), torch.float32)
    groups = attention.plan(step, None, 0)
    found = [part for g in groups for part in (g.tokens, g.blocks, g.mask, *(g.outputs or ()))]
    tensors = [part for part in found if isinstance(part, torch.Tensor)]
    assert any(group.outputs is not None for group in groups)
    assert any(group.mask is not None for group in groups)
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == set(uploaded)
