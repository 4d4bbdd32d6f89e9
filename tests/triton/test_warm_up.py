"""Nothing is compiled once an engine has started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from asyncllm.core.batch import StepBatch
from asyncllm.gpu.batch.sampling_inputs import RowsToSample, SamplingStages
from asyncllm.gpu.batch.sampling_table import SAMPLE_OP_PARAMS
from asyncllm.gpu.graph.captures import exclusive_compilation
from asyncllm.gpu.graph.cuda_graphs import GraphKey, StepPart, default_batch_sizes
from asyncllm.gpu.graph.warm_up import warm_up
from asyncllm.gpu.model_runner import ModelRunner
from tests.static_runner import queue_mixed_step, replay_of, steps_of
from tests.triton.small_steps import MODELS, ROWS, make_step


@contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Triton's own launches up to the compiler, for a GPU that is not there: what it would compile
    is noted, by the key that it looks a compiled kernel up by, and nothing runs."""
    found: set[str] = set()

    def hook(*, key: Any, fn: Any, **_: Any) -> bool:
        found.add(f"{fn.name} {key}")
        return True

    stub = SimpleNamespace(
        get_current_device=lambda: 4242,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", stub)
        patch.setattr("triton.knobs.runtime.jit_cache_hook", hook)
        with torch.inference_mode():
            yield found


def run_everything(runner: ModelRunner) -> None:
    """Every bucket, batch sizes that have none, both halves, and mixed steps of all kinds."""
    replay, memory, info = replay_of(runner), steps_of(runner).memory, runner.info
    memory.tables.allocate(SamplingStages.TOKEN_CONSTRAINTS | SamplingStages.PENALTIES)
    stages = (
        SamplingStages.NONE,
        SamplingStages.TOKEN_CONSTRAINTS,
        SamplingStages.PENALTIES | SamplingStages.LOGPROBS,
    )
    memory.prepare_sampling(SamplingStages.LOGPROBS, memory.host_buffers[0])
    for rows in sorted({*replay.graphs.buckets, 1, 2, 3, 7, 16, 33, ROWS}):
        replay.graphs.run(GraphKey(rows))
        if replay.has_balanced_attention:
            replay.graphs.run(GraphKey(rows, has_balanced_splits=True))
        for each in stages if rows in (1, 3, ROWS) else ():
            replay.run_padded_rows(GraphKey(rows, StepPart.FORWARD))
            replay.run_padded_rows(GraphKey(rows, StepPart.SAMPLE, each))
    most = info.max_model_len
    for decodes, start, counts in (
        (0, 0, [1]),
        (0, most - 150, [140]),
        (0, 5, [3, 2, 40]),
        (1, most - 60, [17]),
        (5, 0, [16, 9]),
        (ROWS - 1, most - 50, [33]),
        # A single long sequence among short ones.
        (ROWS - 1, None, [2]),
    ):
        rows = decodes + len(counts)
        starts = [5] * (rows - 1) + [0] if start is None else [start] * rows
        starts[0] = most - 2 if start is None else starts[0]
        tokens = [1] * decodes + counts
        given = StepBatch(0, list(range(rows)), starts, tokens, [True] * rows, decodes)
        for each in stages:
            queue_mixed_step(runner, given, each)
    changed, none = torch.arange(3 * ROWS), memory.decode_step_inputs(0)
    for group in none.groups:
        many = replace(group, table_changes=(changed, changed.int()))
        steps_of(runner).model.ops.fill_decode_inputs(none, many)


def draw_for_the_host(runner: ModelRunner) -> None:
    """As HostRows does, from tensors of its own."""
    steps = steps_of(runner)
    for rows in (1, 3):
        lines = torch.arange(rows + 1)
        own = {name: steps.memory.scalars[name][lines] for name in SAMPLE_OP_PARAMS}
        logits = torch.zeros((rows, runner.info.vocab_size))
        drawn = RowsToSample(lines[:-1], lines[:-1], torch.zeros_like(lines))
        steps.model.ops.sample(logits, own, drawn, lines[:-1].clone())


def warm(runner: ModelRunner, progress: Callable[[int, int], None] = lambda *_: None) -> None:
    warm_up(steps_of(runner), replay_of(runner), progress)


@pytest.mark.parametrize(
    ("name", "max_len", "sizes", "dtype"),
    [
        ("window", 4096, default_batch_sizes(ROWS), torch.bfloat16),
        ("window", 4080, (), torch.float16),
        ("window", 200, (2, 4), torch.bfloat16),
        ("window", 1024, (8,), torch.float32),
        ("sinks", 4096, (1, 64), torch.bfloat16),
        pytest.param("experts", 200, (64,), torch.float16, marks=pytest.mark.slow),
        ("groups", 4096, (1, 64), torch.bfloat16),
        pytest.param("wide heads", 4096, (1, 64), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("whole norms", 1024, (1, 64), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("experts", 1024, (), torch.float32, marks=pytest.mark.slow),
        ("hybrid", 1024, (1, 64), torch.bfloat16),
        pytest.param("hybrid", 4096, (), torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_everything_is_compiled_before_the_first_step(monkeypatch, name, max_len, sizes, dtype):
    runner = make_step(max_len, sizes, dtype, **MODELS[name])
    said: list[tuple[int, int]] = []
    with compiling(monkeypatch) as compiled:
        warm(runner, lambda *progress: said.append(progress))
    assert said == [(done, len(said) - 1) for done in range(len(said))]
    kernels = {key.split()[0] for key in compiled}
    common = {
        "norm", "rope_cache", "decode", "prefill", "decode_inputs", "chunk_statistics",
        "sample_tokens",
    }  # fmt: skip
    assert kernels > {f"{kernel}_kernel" for kernel in common}
    if steps_of(runner).model.model.experts:
        tiles = {key for key in compiled if key.startswith("gate_up_kernel")}
        assert len(tiles) == 2, "experts have small tiles and large ones"
    assert replay_of(runner).has_balanced_attention == (max_len > 1024)
    with compiling(monkeypatch) as found:
        run_everything(runner)
        draw_for_the_host(runner)
    assert not found - compiled, "\n".join(sorted(found - compiled))
    assert not compiled - found, "\n".join(sorted(compiled - found))


def test_decode_steps_alone_leave_kernels_cold(monkeypatch):
    """What is noted tells kernels that are warm from those that are not."""
    runner = make_step(4096, (1, 2), torch.bfloat16)  # both share a sequence among programs
    with compiling(monkeypatch) as decoding:
        for bucket in replay_of(runner).graphs.buckets:
            replay_of(runner).run_padded_rows(GraphKey(bucket))
    with compiling(monkeypatch) as every:
        warm(runner)
    cold = {key.split()[0] for key in every - decoding}
    assert cold == {
        "sample_tokens_kernel", "chunk_statistics_kernel", "decode_kernel", "merge_kernel",
        "prefill_kernel",
    }  # fmt: skip


def test_a_small_mixed_step_leaves_large_experts_cold(monkeypatch):
    """Of 65 tokens, in sequences of 50 at most."""
    runner = make_step(50, (1, 64), torch.bfloat16, **MODELS["experts"])
    with compiling(monkeypatch) as every:
        warm(runner)
    monkeypatch.setattr(steps_of(runner).model.ops, "expert_kernel_switch_points", lambda *_: ())
    with compiling(monkeypatch) as small:
        warm(runner)
    cold = {key.split()[0] for key in every - small}
    assert cold == {"tile_ends_kernel", "gate_up_kernel", "down_kernel"}
    assert not small - every


def test_engines_compile_in_turn(monkeypatch):
    meeting, met = threading.Barrier(2), []

    def enter() -> None:
        with exclusive_compilation():
            try:
                meeting.wait(0.2)
                met.append(True)
            except threading.BrokenBarrierError:
                met.append(False)

    def both() -> list[bool]:
        met.clear()
        meeting.reset()
        threads = [threading.Thread(target=enter) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return met

    assert both() == [False, False]
    monkeypatch.setattr("asyncllm.gpu.graph.captures.COMPILE_LOCK_TIMEOUT_SECONDS", 0.0)
    assert both() == [True, True]
    monkeypatch.undo()
    assert both() == [False, False]
