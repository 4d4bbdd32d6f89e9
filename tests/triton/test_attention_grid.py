"""Grid sizes of attention for every batch size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from asyncllm.core.batch import StepBatch
from asyncllm.gpu.batch.sampling_inputs import SamplingStages
from asyncllm.gpu.graph.cuda_graphs import GraphKey, StepPart
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.attention_plan import TritonPlan
from asyncllm.gpu.ops.triton.tuning import cdiv, wave_utilisation
from tests.static_runner import replay_of
from tests.step_inputs import captured, planned
from tests.triton.launches import recording
from tests.triton.small_steps import make_step

CPU = torch.device("cpu")
SMS, PLACES, KV_HEADS = 132, 528, 8


def backend(num_kv_heads: int, head_dim: int) -> TritonAttention:
    shape = AttentionShape(32, num_kv_heads, head_dim, 1.0)
    return TritonAttention(shape, torch.bfloat16, CPU, capability=90, num_sms=SMS)


ATTENTION = backend(KV_HEADS, 128)
WIDE = backend(4, 512)
"""Gemma 4 31B's full layers."""
TABLE = torch.zeros((513, 8), dtype=torch.int32)
MAX_LEN = 40_960


def plan_of(
    lengths: Any, counts: int = 1, attention: TritonAttention = ATTENTION, window: int | None = None
) -> TritonPlan:
    """Rows of so many new tokens at the end of sequences."""
    lengths = np.array(lengths)
    rows = np.full_like(lengths, counts)
    inputs = planned(TABLE.numpy(), np.arange(len(rows)), lengths - rows, rows, 16)
    return attention.plan(inputs, window, 0)


def grids_of(
    plan: TritonPlan, tokens: int, attention: TritonAttention = ATTENTION
) -> dict[str, tuple[int, ...]]:
    heads, size = attention.shape.num_kv_heads, attention.shape.head_dim
    q = torch.empty((tokens, 32, size), dtype=torch.bfloat16, device="meta")
    cache = torch.empty((2, 4, 16, heads, size), dtype=torch.bfloat16, device="meta")
    # Partial results lie in a workspace of the plan.
    if plan.workspace is not None:
        plan.workspace = plan.workspace.to("meta")
    with recording() as launches:
        attention(q, q, q, cache, plan)
    return {launch.kernel.fn.__name__.removesuffix("_kernel"): launch.grid for launch in launches}


def check_workspace(plan: TritonPlan, programs: int, head_dim: int) -> None:
    """Of each head a row's sum, its largest score and its output."""
    assert plan.workspace is not None
    assert plan.workspace.numel() == programs * 32 * (head_dim + 2)


def check_prefills(attention: TritonAttention, rows: int, count: int, tile: int) -> TritonPlan:
    """Rows of new tokens behind 32k each fill the device, or have one program for each tile."""
    heads, lengths = attention.shape.num_kv_heads, np.full(rows, 32_768 + count)
    plan = plan_of(lengths, count, attention)
    tiles = rows * count // tile + rows
    programs = tiles * heads * plan.tile_splits
    assert min(tiles * heads, 0.6 * SMS) <= programs <= 2 * max(tiles * heads, SMS)
    if plan.tile_splits > 1:
        assert tiles * heads < SMS
        assert wave_utilisation(programs, SMS) > 0.6
        check_workspace(plan, rows * count * plan.tile_splits, attention.shape.head_dim)
    if rows in (1, 2, 3, 9, 17, 512):
        merge = {"merge": (rows * count, 32, 1)} if plan.tile_splits > 1 else {}
        expected = {"prefill": (tiles, heads, plan.tile_splits)} | merge
        assert grids_of(plan, rows * count, attention) == expected
    return plan


@pytest.mark.parametrize("count", [20, 200])
def test_a_prefill_behind_a_long_prefix_fills_the_device(count: int) -> None:
    for rows in range(1, 513):
        check_prefills(ATTENTION, rows, count, 32)


def test_a_prefill_is_split_by_its_prefix_and_its_window() -> None:
    assert plan_of([32_788], 20).tile_splits == 15
    assert plan_of([400], 20).tile_splits == 1
    assert plan_of([32_788], 20, window=256).tile_splits == 1


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
        plan = plan_of(lengths)
        fair = int(lengths.sum()) * KV_HEADS // PLACES
        assert longest_program(lengths, plan) <= 3 * fair + 1024, rows
        balanced += bool(plan.extra_splits)
        if plan.extra_splits:
            check_workspace(plan, rows + plan.extra_splits, 128)
    assert balanced > 400


@pytest.mark.parametrize(
    ("attention", "extra"), [(ATTENTION, 132), (WIDE, 132)], ids=["heads of 128", "heads of 512"]
)
def test_a_long_row_is_shared_out(attention: TritonAttention, extra: int) -> None:
    """Two waves: of 4 programs a multiprocessor for 8 heads, and of 2 for 4 heads."""
    plan = plan_of(skewed(72), attention=attention)
    assert plan.extra_splits == extra
    decode = (72 + extra, attention.shape.num_kv_heads, 1)
    assert grids_of(plan, 72, attention) == {"decode": decode, "merge": (72, 32, 1)}


def test_heads_of_512_have_fewer_places() -> None:
    """Two programs of decode attention to a multiprocessor, and tiles of 64 rows, 8 tokens."""
    for rows in range(1, 513):
        plan = plan_of(np.full(rows, 32_768), attention=WIDE)
        assert wave_utilisation(rows * 4 * plan.splits, 2 * SMS) > 0.7, rows
        check_prefills(WIDE, rows, 20, 8)
        if rows in (1, 9, 512):
            assert grids_of(plan, rows, WIDE)["decode"] == (rows, 4, plan.splits)
            if plan.splits > 1:
                check_workspace(plan, rows * plan.splits, 512)
    assert plan_of([32_768], attention=WIDE).splits == 60


@pytest.mark.parametrize("length", [300, 4096, 32_768])
def test_rows_of_like_length_keep_their_splits(length: int) -> None:
    for rows in range(1, 513):
        lengths = np.linspace(0.7 * length, length, rows).astype(np.int64)
        assert not ATTENTION.has_skewed_lengths(rows, lengths, MAX_LEN, None), rows
        assert plan_of(lengths).extra_splits == 0


def test_a_window_or_short_rows_are_never_skewed() -> None:
    assert not ATTENTION.has_skewed_lengths(128, skewed(128), MAX_LEN, 4096)
    assert not ATTENTION.has_skewed_lengths(128, skewed(128, 1024, 1), MAX_LEN, None)
    assert ATTENTION.has_skewed_lengths(128, skewed(128, 8192, 1), MAX_LEN, None)
    assert [ATTENTION.may_have_skewed_lengths(length, None) for length in (1024, 1025)] == [
        False,
        True,
    ]
    assert not ATTENTION.may_have_skewed_lengths(MAX_LEN, 4096)


def test_a_graph_has_either_form() -> None:
    nothing = torch.zeros(72, dtype=torch.int64)
    rows = captured(
        TABLE, nothing, nothing, nothing.int(), 16, max_len=MAX_LEN, has_balanced_splits=True
    )
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
        launched.stages = SamplingStages(stages)
        assert replay.prepare(launched)
        assert (launched.bucket, launched.has_balanced_splits) == (64, longest == 4096)
        replay.forward(launched)
    assert keys == [
        GraphKey(64, has_balanced_splits=True),
        GraphKey(64),
        GraphKey(64, has_balanced_splits=True),
        GraphKey(64, StepPart.FORWARD, has_balanced_splits=True),
    ]
    assert [record.key for record in replay.graphs.capture_stats] == [keys[0], keys[1], keys[3]]
    short = make_step(1024, (64,), torch.bfloat16)
    assert (replay.has_balanced_attention, replay_of(short).has_balanced_attention) == (True, False)
