"""How many programs attention launches, for every batch size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from asyncllm.core.batch import StepBatch
from asyncllm.gpu.batch.sampling_inputs import Stages
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.graph.cuda_graphs import GraphKey, Part
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton import decode_attention, merge_attention, prefill_attention
from asyncllm.gpu.ops.triton.attention import TritonAttention, TritonPlan
from asyncllm.gpu.ops.triton.tuning import cdiv, num_extra_splits, wave_utilisation
from tests.static_runner import replay_of
from tests.step_inputs import captured, planned
from tests.triton.launches import Launch, recording
from tests.triton.small_steps import make_step

CPU = torch.device("cpu")
SMS, PLACES, KV_HEADS = 132, 528, 8
ATTENTION = TritonAttention(
    AttentionShape(32, KV_HEADS, 128, 0.1), torch.bfloat16, CPU, capability=90, num_sms=SMS
)
WIDE = TritonAttention(
    AttentionShape(32, 4, 512, 1.0), torch.bfloat16, CPU, capability=90, num_sms=SMS
)
"""Gemma 4 31B's full layers."""
CACHE = torch.empty((2, 4, 16, KV_HEADS, 128), dtype=torch.bfloat16)
TABLE = torch.zeros((513, 8), dtype=torch.int32)
MAX_LEN = 40_960


def step(lengths: np.ndarray, counts: np.ndarray) -> StepInputs:
    """Rows of so many new tokens at the end of sequences; decodes first."""
    return planned(TABLE.numpy(), np.arange(len(counts)), lengths - counts, counts, 16)


def launches_of(
    plan: TritonPlan, tokens: int, attention: TritonAttention = ATTENTION
) -> dict[str, Launch]:
    shape = attention.shape
    q = torch.empty((tokens, 32, shape.head_dim), dtype=torch.bfloat16, device="meta")
    cache = torch.empty(
        (2, 4, 16, shape.num_kv_heads, shape.head_dim), dtype=torch.bfloat16, device="meta"
    )
    # Partial results lie in a workspace of the plan.
    if plan.workspace is not None:
        plan.workspace = plan.workspace.to("meta")
    modules = (decode_attention, prefill_attention, merge_attention)
    with recording(modules[0]) as a, recording(modules[1]) as b, recording(modules[2]) as c:
        attention(q, q, q, cache, plan)
    return {launch.kernel.fn.__name__: launch for launch in (*a, *b, *c)}


@pytest.mark.parametrize("count", [20, 200])
def test_a_prefill_behind_a_long_prefix_fills_the_device(count: int) -> None:
    """Prefill rows of so many new tokens behind 32k each: before, a row was a program for each of
    its tiles and key/value heads, of 512 steps or more."""
    for rows in range(1, 513):
        counts = np.full(rows, count)
        plan = ATTENTION.plan(step(counts + 32_768, counts), None, 0)
        tiles = rows * count // 32 + rows
        programs = tiles * KV_HEADS * plan.tile_splits
        assert programs >= min(tiles * KV_HEADS, 0.6 * SMS)
        assert programs <= 2 * max(tiles * KV_HEADS, SMS)
        if plan.tile_splits > 1:
            assert tiles * KV_HEADS < SMS
            assert wave_utilisation(programs, SMS) > 0.6
            assert plan.workspace is not None
            assert plan.workspace.numel() == rows * count * 32 * 130 * plan.tile_splits
        if rows in (1, 2, 3, 17, 512):
            found = launches_of(plan, rows * count)
            assert found["prefill_kernel"].grid == (tiles, KV_HEADS, plan.tile_splits)
            assert ("merge_kernel" in found) == (plan.tile_splits > 1)
            if plan.tile_splits > 1:
                assert found["merge_kernel"].grid == (rows * count, 32, 1)
    one = ATTENTION.plan(step(np.array([32_788]), np.array([20])), None, 0)
    assert one.tile_splits == 15
    assert ATTENTION.plan(step(np.array([400]), np.array([20])), None, 0).tile_splits == 1
    assert ATTENTION.plan(step(np.array([32_788]), np.array([20])), 256, 0).tile_splits == 1


def skewed(rows: int, longest: int = 32_768, others: int = 500) -> np.ndarray:
    lengths = np.full(rows, others)
    lengths[rows // 2] = longest
    return lengths


def longest_program(lengths: np.ndarray, plan: TritonPlan) -> int:
    """Keys of the longest program, as the kernels count them out."""
    if not plan.extra_splits:
        return cdiv(cdiv(int(lengths.max()), 64), plan.splits) * 64
    share = max(cdiv(cdiv(int(lengths.sum()), plan.extra_splits), 64) * 64, 256)
    shares = -(-lengths // share)
    assert shares.sum() <= len(lengths) + plan.extra_splits
    return min(share, int(lengths.max()))


def test_a_long_row_is_not_waited_for() -> None:
    """One of 32k among so many of 500: no program has more than three times the keys that a place
    of the device has to read in all, or it has few."""
    balanced = 0
    for rows in range(1, 513):
        lengths = skewed(rows)
        plan = ATTENTION.plan(step(lengths, np.ones(rows, dtype=np.int64)), None, 0)
        fair = int(lengths.sum()) * KV_HEADS // PLACES
        assert longest_program(lengths, plan) <= 3 * fair + 1024, rows
        balanced += bool(plan.extra_splits)
        if plan.extra_splits:
            assert plan.workspace is not None
            assert plan.workspace.numel() == (rows + plan.extra_splits) * 32 * 130
    assert balanced > 400
    lengths = skewed(72)
    plan = ATTENTION.plan(step(lengths, np.ones(72, dtype=np.int64)), None, 0)
    extra = num_extra_splits(KV_HEADS, SMS)
    assert plan.extra_splits == extra == 132
    found = launches_of(plan, 72)
    assert found["decode_kernel"].grid == (72 + extra, KV_HEADS, 1)
    assert found["decode_kernel"].arguments["MAX_ROWS"] == 1024
    assert found["merge_kernel"].grid == (72, 32, 1)


def test_heads_of_512_have_fewer_places() -> None:
    """Two programs of decode attention to a multiprocessor, and tiles of 64 rows, 8 tokens."""
    for rows in range(1, 513):
        lengths, ones = np.full(rows, 32_768), np.ones(rows, dtype=np.int64)
        plan = WIDE.plan(step(lengths, ones), None, 0)
        assert wave_utilisation(rows * 4 * plan.splits, 2 * SMS) > 0.7, rows
        prefill = WIDE.plan(step(lengths, ones * 20), None, 0)
        tiles = rows * 20 // 8 + rows
        programs = tiles * 4 * prefill.tile_splits
        assert programs >= min(tiles * 4, 0.6 * SMS)
        assert prefill.tile_splits == 1 or wave_utilisation(programs, SMS) > 0.6
        if rows in (1, 9, 512):
            found = launches_of(plan, rows, WIDE)
            assert found["decode_kernel"].grid == (rows, 4, plan.splits)
            if plan.splits > 1:
                assert plan.workspace is not None
                assert plan.workspace.numel() == rows * 32 * 514 * plan.splits
            found = launches_of(prefill, rows * 20, WIDE)
            assert found["prefill_kernel"].grid == (tiles, 4, prefill.tile_splits)
    assert WIDE.plan(step(np.array([32_768]), np.array([1])), None, 0).splits == 60
    lengths = skewed(72)
    plan = WIDE.plan(step(lengths, np.ones(72, dtype=np.int64)), None, 0)
    assert plan.extra_splits == 2 * 2 * SMS // 4 == 132
    found = launches_of(plan, 72, WIDE)
    assert found["decode_kernel"].grid == (72 + 132, 4, 1)
    assert found["merge_kernel"].grid == (72, 32, 1)


@pytest.mark.parametrize("length", [300, 4096, 32_768])
def test_rows_of_like_length_keep_their_splits(length: int) -> None:
    for rows in range(1, 513):
        lengths = np.linspace(0.7 * length, length, rows).astype(np.int64)
        assert not ATTENTION.is_skewed(rows, lengths, MAX_LEN, None), rows
        assert (
            ATTENTION.plan(step(lengths, np.ones(rows, dtype=np.int64)), None, 0).extra_splits == 0
        )


def test_a_window_or_short_rows_are_never_skewed() -> None:
    assert not ATTENTION.is_skewed(128, skewed(128), MAX_LEN, 4096)
    assert not ATTENTION.is_skewed(128, skewed(128, 1024, 1), MAX_LEN, None)
    assert ATTENTION.is_skewed(128, skewed(128, 8192, 1), MAX_LEN, None)
    assert [ATTENTION.balances(length, None) for length in (1024, 1025)] == [False, True]
    assert not ATTENTION.balances(MAX_LEN, 4096)


def test_a_graph_has_either_form() -> None:
    nothing = torch.zeros(72, dtype=torch.int64)
    rows = captured(TABLE, nothing, nothing, nothing.int(), 16, max_len=MAX_LEN, balanced=True)
    plan = ATTENTION.plan(rows, None, 0)
    assert (plan.splits, plan.extra_splits) == (1, 132)
    plan = ATTENTION.plan(rows, 4096, 0)
    assert (plan.splits, plan.extra_splits) == (5, 0)


def test_the_host_chooses_the_graph_by_the_lengths_of_a_step() -> None:
    runner = make_step(4096, (64,), torch.bfloat16)
    replay, keys = replay_of(runner), list[GraphKey]()
    replay.graphs._run = keys.append
    for longest, stages in ((4096, 0), (900, 0), (4096, 0), (4096, 1)):
        positions = skewed(60, longest, 5) - 1
        launched = LaunchedStep(
            StepBatch(0, list(range(60)), positions.tolist(), [1] * 60, [True] * 60, 60, 60)
        )
        launched.stages = Stages(stages)
        assert replay.prepare(launched)
        assert (launched.bucket, launched.balanced) == (64, longest == 4096)
        replay.forward(launched)
    assert keys == [
        GraphKey(64, balanced=True),
        GraphKey(64),
        GraphKey(64, balanced=True),
        GraphKey(64, Part.FORWARD, balanced=True),
    ]
    assert [record.key for record in replay.graphs.captured] == [keys[0], keys[1], keys[3]]
    short = make_step(1024, (64,), torch.bfloat16)
    assert (replay.can_balance, replay_of(short).can_balance) == (True, False)
