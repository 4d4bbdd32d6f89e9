"""How the memory of a GPU is divided and given back, on simulated GPUs; and the largest step,
which runs on the CPU as well."""

from __future__ import annotations

import gc
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.core.batch import StepBatch
from asyncllm.errors import EngineError, KVCacheTooSmallError
from asyncllm.gpu import build, cache_sizing, decoder_loading, memory, model_runner
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.cache_sizing import KVCacheSize, min_cache_bytes, size_cache
from asyncllm.gpu.execution_mode import graph_reserve_bytes
from asyncllm.gpu.graph.capturer import CudaGraphCapturer
from asyncllm.gpu.kv_cache import block_bytes
from asyncllm.gpu.memory import (
    SEGMENT_BYTES,
    MemoryProbe,
    check_cache_fits,
    check_weights_fit,
    cuda_cache_bytes,
    is_out_of_memory,
    release_cached_memory,
)
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_plan
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.profile import largest_steps, profile_run
from asyncllm.gpu.state_cache import StateCache, StateSpec
from asyncllm.gpu.weights import dummy_weights
from tests.ahead_on_cpu import AheadOnCPU
from tests.cuda_captures import Captures
from tests.driver import Driver, state_of
from tests.dummy_runner import MODEL, make
from tests.live_bytes import LiveBytes
from tests.static_runner import kv_groups

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
MIB, GIB = 2**20, 2**30


@dataclass
class SimulatedGPU:
    """A GPU and torch's allocator on it.

    Attributes:
        others: bytes that the host application, other engines and other processes hold.
        engine: bytes of the engine's own, outside the pool.
        cached: bytes that torch has cached for any allocation.
        taken: bytes that others take while the weights are loaded.
        pooled: bytes that the open pool has taken, or a closed one has left.
        log: what was asked of it.
        error: what the device answers to anything.
        busy: it does not come to an end of its work.
    """

    total: int = 80 * GIB
    others: int = 0
    engine: int = 0
    cached: int = 0
    pooled: int = 0
    taken: int = 0
    native: bool = True
    error: Exception | None = None
    busy: bool = False
    log: list[str] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.total - self.others - self.engine - self.cached - self.pooled

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        assert device == GPU
        self._answer("info")
        return self.free, self.total

    def has_private_pools(self) -> bool:
        return self.native

    @contextmanager
    def private_pool(self, device: torch.device) -> Iterator[Callable[[], int]]:
        assert device == GPU
        self._answer("pool")
        before = self.pooled
        yield lambda: self.pooled - before
        self._answer("closed")

    def take(self, size: int) -> None:
        """A step allocates so much at once, in whole segments."""
        assert self.log[-1] == "pool"
        size = -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
        if size > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.pooled += size

    def synchronize(self, device: torch.device, timeout: float) -> bool:
        self._answer("synchronize")
        return not self.busy

    def empty_cache(self, device: torch.device, timeout: float = -1) -> None:
        self._answer("empty_cache")
        self.cached = self.pooled = 0

    def _answer(self, word: str) -> None:
        self.log.append(word)
        if self.error is not None:
            raise self.error


def on_gpu(gpu: SimulatedGPU, call: Callable[..., Any], *args: Any) -> Any:
    with mock.patch.object(memory, "GPU_MEMORY_PROBE", gpu):
        return call(*args)


def size(gpu: SimulatedGPU, *, weights: int, step: Any, config: EngineConfig | None = None, **kw):
    """As a start does: look, load, measure."""
    config = config or EngineConfig()
    settings = {"graph_reserve_bytes": 0, "captured_step_fraction": 0.0, "min_bytes": 1} | kw
    with mock.patch.object(memory, "GPU_MEMORY_PROBE", gpu):
        free_at_start = check_weights_fit(config, GPU, weights)
        gpu.engine += weights
        gpu.others += gpu.taken
        return cuda_cache_bytes(
            config,
            GPU,
            free_at_start=free_at_start,
            weights_bytes=weights,
            profile_run=step if callable(step) else lambda: gpu.take(step),
            **settings,
        )


@pytest.mark.parametrize(
    ("gpu", "step", "graph_reserve_bytes", "left"),
    [
        # 0.9 of 80 GiB is 72, and 72 - 16 - 3 - 1 = 52.
        ({}, 3 * GIB, GIB, 52 * GIB),
        # With 6 GiB held elsewhere, the engine still has its 72: 74 are free.
        ({"others": 6 * GIB}, 3 * GIB, 0, 53 * GIB),
        # 40 GiB are free, and that is less than the share: 40 - 16 - 3 = 21.
        ({"others": 40 * GIB}, 3 * GIB, 0, 21 * GIB),
        # The host used 60 GiB once. Weights and step need them, and they count as free.
        ({"cached": 60 * GIB}, 30 * GIB, 0, 26 * GIB),
        # Whole segments.
        ({"total": 20 * GIB + 12345}, 1, 0, 2 * GIB - SEGMENT_BYTES),
        # While the weights were loaded another process took 50 GiB: 80 - 16 - 50 are free.
        ({"taken": 50 * GIB}, 3 * GIB, 0, 11 * GIB),
    ],
)
def test_cache_gets_the_remaining_memory(gpu, step, graph_reserve_bytes, left):
    simulated = SimulatedGPU(**gpu)
    assert (
        size(simulated, weights=16 * GIB, step=step, graph_reserve_bytes=graph_reserve_bytes)
        == left
    )
    assert simulated.pooled == 0
    asked = ["empty_cache", "info"]
    assert simulated.log == [*asked, "empty_cache", "pool", "closed", *asked]


def test_two_engines_share_a_gpu():
    gpu = SimulatedGPU()
    config = EngineConfig(gpu_memory_utilization=0.5)
    first = size(gpu, weights=2 * GIB, step=1 * GIB, config=config)
    assert first == 37 * GIB
    gpu.engine += first + 1 * GIB
    second = size(gpu, weights=2 * GIB, step=1 * GIB, config=config)
    assert second == 37 * GIB
    gpu.engine += second + 1 * GIB
    assert gpu.free == 0
    with pytest.raises(EngineError, match="0 are free"):
        size(gpu, weights=2 * GIB, step=1 * GIB, config=config)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "available", "blocks", "alone"),
    [
        # Sequences of 16 blocks, or of 3; all counts with the null block.
        (10, 256, 1001, 160, 320),  # all ten sequences
        (10, 48, 1001, 30, 60),
        (10, 256, 202, 100, 201),  # half of what there is
        (10, 256, 33, 16, 32),  # half is one block too few: a whole sequence
        (10, 256, 35, 16, 34),
        (10, 256, 36, 17, 35),
        (10, 256, 17, 16, 16),  # all, for one sequence
        (1, 256, 1001, 16, 32),
    ],
)
def test_the_default_cache_leaves_the_application_its_half(
    max_num_seqs, max_model_len, available, blocks, alone
):
    groups = kv_groups(MODEL, 16)
    limits = {
        "max_num_seqs": max_num_seqs,
        "step_tokens": 8,
        "available_bytes": available * block_bytes(groups, torch.bfloat16),
    }
    whole = size_cache(
        EngineConfig(max_model_len=max_model_len), MODEL, groups, torch.bfloat16, **limits
    )
    assert whole.num_blocks == alone + 1
    limits["shares_memory"] = True
    config = EngineConfig(max_model_len=max_model_len)
    sized = size_cache(config, MODEL, groups, torch.bfloat16, **limits)
    assert sized.num_blocks == blocks + 1
    assert sized.max_model_len == max_model_len
    asked = config.with_overrides({"num_blocks": 1000})
    assert size_cache(asked, MODEL, groups, torch.bfloat16, **limits).num_blocks == 1001


def test_cache_too_small_for_a_sequence_names_numbers_and_share():
    gpu = SimulatedGPU()
    config = EngineConfig(gpu_memory_utilization=0.25)
    with pytest.raises(KVCacheTooSmallError) as caught:
        size(
            gpu,
            weights=16 * GIB,
            step=3 * GIB,
            config=config,
            min_bytes=2 * GIB,
            graph_reserve_bytes=MIB,
        )
    message = str(caught.value)
    numbers = (80 * GIB, 20 * GIB, 16 * GIB, 3 * GIB, MIB, 2 * GIB, GIB - 2 * MIB, 64 * GIB)
    for number in numbers:
        assert re.search(rf"\b{number}\b", message), (number, message)
    assert "raise gpu_memory_utilization" in message
    assert "max_num_batched_tokens" in message
    assert gpu.pooled == 0


def test_full_gpu_error_does_not_suggest_larger_share():
    gpu = SimulatedGPU(others=60 * GIB)
    with pytest.raises(KVCacheTooSmallError) as caught:
        size(gpu, weights=16 * GIB, step=3 * GIB, min_bytes=2 * GIB)
    assert "free memory on the GPU" in str(caught.value)
    assert "raise gpu_memory_utilization" not in str(caught.value)
    assert f"{20 * GIB} were free at start" in str(caught.value)


def test_exactly_enough_is_enough():
    settings = {"weights": 16 * GIB, "step": 3 * GIB}
    assert size(SimulatedGPU(), **settings, min_bytes=53 * GIB) == 53 * GIB
    with pytest.raises(KVCacheTooSmallError):
        size(SimulatedGPU(), **settings, min_bytes=53 * GIB + 1)


def test_oversized_step_error_names_settings_to_lower():
    gpu = SimulatedGPU(total=20 * GIB)
    with pytest.raises(EngineError, match="the largest step does not fit") as caught:
        size(gpu, weights=16 * GIB, step=5 * GIB)
    assert not isinstance(caught.value, KVCacheTooSmallError)
    assert "lower max_num_batched_tokens, max_num_seqs or max_model_len" in str(caught.value)
    assert str(16 * GIB) in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    # Its traceback would keep the step's tensors.
    assert caught.value.__cause__.__traceback__ is None


def test_another_failure_of_the_step_is_itself():
    gpu = SimulatedGPU()

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        size(gpu, weights=0, step=broken)
    assert not isinstance(caught.value, EngineError)


def test_an_allocator_without_pools_wants_the_size_said():
    with pytest.raises(EngineError, match="kv_cache_memory or num_blocks"):
        size(SimulatedGPU(native=False), weights=0, step=0)


def test_oversized_weights_are_refused_unread():
    gpu = SimulatedGPU(total=20 * GIB, others=10 * GIB)
    with pytest.raises(EngineError) as caught:
        on_gpu(gpu, check_weights_fit, EngineConfig(), GPU, 11 * GIB)
    message = str(caught.value)
    for word in (str(11 * GIB), str(20 * GIB), f"{10 * GIB} are free", "free memory"):
        assert word in message
    low = EngineConfig(gpu_memory_utilization=0.25)
    with pytest.raises(EngineError, match=r"gpu_memory_utilization=0\.25 allows.*raise it"):
        on_gpu(gpu, check_weights_fit, low, GPU, 6 * GIB)
    assert on_gpu(gpu, check_weights_fit, low, GPU, 5 * GIB) == 10 * GIB


@pytest.mark.parametrize("fields", [{"num_blocks": 100}, {"kv_cache_memory": "1GiB"}])
def test_memory_share_does_not_limit_weights_with_explicit_cache(fields):
    config = EngineConfig(gpu_memory_utilization=0.1, **fields)
    gpu = SimulatedGPU(total=20 * GIB)
    assert on_gpu(gpu, check_weights_fit, config, GPU, 19 * GIB) == 20 * GIB
    with pytest.raises(EngineError, match="are free"):
        on_gpu(gpu, check_weights_fit, config, GPU, 21 * GIB)


def test_oversized_configured_cache_names_its_setting():
    gpu = SimulatedGPU(total=20 * GIB, engine=16 * GIB)
    for fields, knob in (
        ({"num_blocks": 777}, "num_blocks=777"),
        ({"kv_cache_memory": "5GiB"}, f"kv_cache_memory={5 * GIB}"),
    ):
        config = EngineConfig(**fields)
        on_gpu(gpu, check_cache_fits, config, GPU, 4 * GIB)
        with pytest.raises(KVCacheTooSmallError) as caught:
            on_gpu(gpu, check_cache_fits, config, GPU, 4 * GIB + 1)
        for word in (knob, f"lower {knob.split('=')[0]}", str(20 * GIB), f"{4 * GIB} are free"):
            assert word in str(caught.value)
    on_gpu(gpu, check_cache_fits, EngineConfig(), GPU, 100 * GIB)


@pytest.mark.parametrize("layers", [((0, 1),), ((0,), (1,))], ids=["one group", "two groups"])
@pytest.mark.parametrize(("asked", "blocks"), [(None, 1), (16, 1), (17, 2), (256, 16)])
def test_the_least_cache_has_the_null_block_and_one_sequence(asked, blocks, layers):
    config, groups = EngineConfig(max_model_len=asked), kv_groups(MODEL, 16, *layers)
    least = min_cache_bytes(config, groups, torch.bfloat16, 8)
    assert least == (blocks * len(layers) + 1) * block_bytes(groups, torch.bfloat16)
    sized, limits = (groups, torch.bfloat16), {"max_num_seqs": 4, "step_tokens": 8}
    found = size_cache(config, MODEL, *sized, **limits, available_bytes=least)
    assert found.max_model_len == (asked or 16)
    with pytest.raises(KVCacheTooSmallError):
        size_cache(config, MODEL, *sized, **limits, available_bytes=least - 1)


def test_configured_values_are_not_measured(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a step was run")

    monkeypatch.setattr(cache_sizing, "profile_run", refuse)
    monkeypatch.setattr(cache_sizing, "cuda_cache_bytes", refuse)
    decoder = make_decoder()
    assert chosen(decoder, num_blocks=3).num_blocks == 4
    memory = 10 * block_bytes(kv_groups(MODEL, 16), torch.float32)
    assert chosen(decoder, kv_cache_memory=memory).num_blocks == 10


def chosen(decoder: Decoder, states: StateCache | None = None, **fields) -> KVCacheSize:
    config = EngineConfig(**fields)
    return cache_sizing.choose_cache_size(
        config,
        AheadOnCPU().mode(config),
        decoder,
        kv_groups(MODEL, 16),
        states,
        free_at_start=10,
        graph_batch_sizes=(1, 2),
        token_budget=64,
        max_num_seqs=4,
    )


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        # Budget, sequences, length; then decodes and prefill rows of each step.
        ((8192, 256, 40960), [(0, [8192]), (255, [7937]), (256, [])]),
        ((100, 4, 30), [(0, [30, 30, 30, 10]), (4, [])]),
        ((100, 8, 30), [(0, [30, 30, 30, 10]), (4, [30, 30, 30, 6]), (8, [])]),
        # Never more rows than sequences, nor more tokens than the budget.
        ((1000, 4, 30), [(0, [30] * 4), (4, [])]),
        ((8, 64, 30), [(0, [8]), (7, [1]), (8, [])]),
        ((60, 3, 30), [(0, [30, 30]), (1, [30, 29]), (3, [])]),
        ((1, 1, 1), [(0, [1]), (1, [])]),
    ],
)
def test_the_largest_steps(limits, expected):
    found = [(decodes, counts.tolist()) for decodes, counts in largest_steps(*limits)]
    assert found == [(decodes, [1] * decodes + rest) for decodes, rest in expected]
    for _, counts in found:
        assert sum(counts) <= limits[0]
        assert len(counts) <= limits[1]
        assert max(counts) <= limits[2]


class RecordingAttention(TorchAttention):
    """Attention that notes what it is asked to plan, and how often it runs."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.steps: list[tuple] = []
        self.calls = 0

    def plan(self, step, window, group):
        rows, own, table = step.host, step.groups[group], step.row_block_tables(group)
        self.steps.append(
            (
                step.num_decodes,
                np.diff(rows.query_start_loc).tolist(),
                rows.seq_lens.tolist(),
                table.shape,
                None if step.output_indices is None else len(step.output_indices),
            )
        )
        assert step.num_tokens == rows.query_start_loc[-1] == len(step.positions)
        assert int(step.positions.max()) == rows.seq_lens[0] - 1
        assert (rows.starts + np.diff(rows.query_start_loc) == rows.seq_lens).all()
        assert not table.any()
        assert int(own.slot_mapping.max()) < own.block_size
        return super().plan(step, window, group)

    def __call__(self, q, k, v, cache, plan):
        self.calls += 1
        assert cache.shape[1] == 1
        return super().__call__(q, k, v, cache, plan)


class RecordingOps(TorchOps):
    def __init__(self) -> None:
        self.sampled: list[int] = []

    def sample(self, logits, *args):
        self.sampled.append(logits.shape[0])
        super().sample(logits, *args)
        assert (args[-1] >= 0).all()


def make_decoder(model=MODEL, dtype: torch.dtype = torch.float32) -> Decoder:
    attention = {kind: RecordingAttention(kind.shape, dtype) for kind in attention_kinds(model)}
    decoder = build_decoder(model, RecordingOps(), attention, dummy_weights(model, dtype, CPU))
    decoder.set_max_positions(model.max_position_embeddings)
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_step_covers_prefill_mixed_and_decode(dtype):
    decoder = make_decoder(dtype=dtype)
    layers = list(decoder.layers)
    profile_run(
        decoder,
        kv_groups(MODEL, 16),
        max_num_batched_tokens=100,
        max_num_seqs=6,
        max_model_len=60,
    )
    (attention,) = decoder.attention.values()
    assert attention.steps == [
        (0, [60, 40], [60, 60], (2, 4), 6),
        (4, [1, 1, 1, 1, 60, 36], [60] * 6, (6, 4), 6),
        (6, [1] * 6, [60] * 6, (6, 4), None),
    ]
    assert decoder.ops.sampled == [6, 6, 6]
    assert decoder.layers == layers


def test_one_layer_of_each_window_stands_for_all():
    sliding = tuple(index >= 4 for index in range(8))
    model = replace(MODEL, num_layers=8, sliding_window=20, sliding_layers=sliding)
    decoder = make_decoder(model)
    run = {"max_num_batched_tokens": 40, "max_num_seqs": 1, "max_model_len": 40}
    profile_run(decoder, kv_plan(model).kv_groups(decoder.attention, 8), **run)
    # Layers 0 and 1 see all, 4 and 7 a window, in two steps of which both kinds were planned.
    assert [kind.window for kind in decoder.attention] == [None, 20]
    for attention in decoder.attention.values():
        assert attention.calls == 2 * 2
        assert len(attention.steps) == 2
    single = make_decoder(replace(MODEL, num_layers=1))
    profile_run(single, kv_groups(single.model, 8), **run)
    (attention,) = single.attention.values()
    assert attention.calls == 2


def test_few_layers_take_as_much_as_all_of_them():
    """What the shortcut is worth: the peak of live bytes of 12 layers is that of 3."""
    peaks = []
    for count in (3, 12):
        decoder = make_decoder(replace(MODEL, num_layers=count))
        run = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "max_model_len": 64}
        groups = kv_groups(decoder.model, 16)
        profile_run(decoder, groups, **run)
        with LiveBytes() as live:
            profile_run(decoder, groups, **run)
        peaks.append(live.peak)
        assert live.now == 0
    assert peaks[0] == peaks[1] > 0


@pytest.mark.parametrize(("has_states", "graphs"), [(False, "decode"), (True, "auto")])
def test_sizing_measures_the_schedulers_step(monkeypatch, has_states, graphs):
    """On a simulated GPU: the budget, the sequences and the length of the configuration, and
    a first run outside the pool. Recurrent states are there already, beside the weights."""
    states = StateCache([StateSpec((8,))], 4, torch.bfloat16, CPU) if has_states else None
    asked = []
    passed = {}

    def measure(config, device, *, profile_run, **rest):
        passed.update(rest)
        profile_run()
        return 9 * block_bytes(kv_groups(MODEL, 16), torch.bfloat16)

    monkeypatch.setattr(cache_sizing, "cpu_cache_bytes", lambda: 1 / 0)
    monkeypatch.setattr(cache_sizing, "cuda_cache_bytes", measure)
    monkeypatch.setattr(cache_sizing, "profile_run", lambda decoder, groups, **kw: asked.append(kw))
    decoder = make_decoder()
    embedding: Any = OnGPU(torch.bfloat16)  # of which nothing but dtype and device is asked
    decoder.embedding = embedding
    monkeypatch.setattr(decoder, "set_max_positions", lambda count: asked.append(count))
    assert chosen(decoder, states, max_model_len=100, cuda_graphs=graphs).num_blocks == 9
    common = {"max_model_len": 100, "states": states}
    assert asked == [
        100,
        {"max_num_batched_tokens": 1, "max_num_seqs": 1} | common,
        {"max_num_batched_tokens": 64, "max_num_seqs": 4} | common,
    ]
    assert passed == {
        "free_at_start": 10,
        "weights_bytes": decoder_loading.weights_bytes(MODEL, torch.bfloat16) + 80 * has_states,
        "graph_reserve_bytes": graph_reserve_bytes((1, 2), 4, MODEL.vocab_size, 2),
        # Of 64 tokens, the largest captured mixed step has all.
        "captured_step_fraction": float(graphs == "auto"),
        "min_bytes": 8 * block_bytes(kv_groups(MODEL, 16), torch.bfloat16),
    }


@dataclass
class OnGPU:
    dtype: torch.dtype
    device: torch.device = GPU


ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
LAUNCH = RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize(
    ("device", "state", "log", "warning"),
    [
        (GPU, {}, ["synchronize", "empty_cache"], ""),
        (CPU, {}, [], ""),
        (GPU, {"error": ILLEGAL}, ["synchronize"], str(ILLEGAL)),
        (GPU, {"error": LAUNCH}, ["synchronize"], str(LAUNCH)),
        # Freeing device memory waits for all of its work, so it must not be tried.
        (GPU, {"busy": True}, ["synchronize"], "still busy"),
    ],
)
def test_release_waits_and_then_empties(device, state, log, warning, caplog):
    gpu = SimulatedGPU(cached=GIB, **state)
    assert on_gpu(gpu, release_cached_memory, device) == (not warning)
    assert gpu.log == log
    assert (gpu.free == gpu.total) == ("empty_cache" in log)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * bool(warning)
    assert warning in caplog.text


def test_runner_drops_tensors_before_releasing_memory(monkeypatch):
    """With the collector off: a cycle would keep tensors alive past the moment that counts."""
    runner = make()
    driver = Driver(runner)
    driver.run([driver.add([1, 2, 3], 3)])
    runner.launch(StepBatch(99))
    state = state_of(runner)
    held = [weakref.ref(x) for x in (state.cache.tensor, state.model.embedding, state.input_batch)]
    alive = []

    def release_cached_memory(device: torch.device) -> bool:
        alive.append((device, [x() for x in held]))
        return True

    monkeypatch.setattr(model_runner, "release_cached_memory", release_cached_memory)
    del state
    gc.collect()
    gc.disable()
    try:
        runner.close()
        runner.close()
    finally:
        gc.enable()
    assert alive == [(CPU, [None] * 3)]
    for call in (runner.collect, lambda: runner.launch(StepBatch(0))):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    runner.discard()


@pytest.mark.parametrize("failure", ["step", "memory"])
def test_an_exception_of_a_step_does_not_keep_the_model(monkeypatch, failure):
    runner = make(attention_backend="torch")
    driver = Driver(runner)
    driver.launch([(driver.add([1], 1), 0)])
    state = state_of(runner)
    embedding = weakref.ref(state.model.embedding)

    def fail(self, inputs, cache):
        activation = inputs.token_ids + 1
        raise RuntimeError("CUDA out of memory" if failure == "memory" else f"{activation.shape}")

    monkeypatch.setattr(type(state.model), "forward", fail)
    del state
    try:
        runner.collect()
    except Exception as error:
        kept = error
    runner.close()
    gc.collect()
    assert embedding() is None
    assert kept.__traceback__ is not None


@pytest.mark.parametrize(
    ("module", "stage"),
    [(build, "KVCache"), (cache_sizing, "size_cache"), (cache_sizing, "recorded_activation_bytes")],
)
def test_a_failed_start_gives_everything_back(monkeypatch, module, stage):
    """While its exception is kept, as the engine keeps it."""
    decoders: list[weakref.ref] = []
    released = []

    def make_decoder(*args):
        decoder = build_decoder(*args)
        decoders.append(weakref.ref(decoder.embedding))
        return decoder

    def fail(*_, **__):
        raise KVCacheTooSmallError("on purpose")

    monkeypatch.setattr(decoder_loading, "build_decoder", make_decoder)
    monkeypatch.setattr(module, stage, fail)

    def release_cached_memory(device: torch.device) -> bool:
        released.append((device, decoders[0]()))
        return True

    monkeypatch.setattr(build, "release_cached_memory", release_cached_memory)
    with pytest.raises(KVCacheTooSmallError) as caught:
        build_model_runner(EngineConfig(load_format="dummy", device="cpu"), MODEL)
    assert released == [(CPU, None)]
    assert [entry.name for entry in caught.traceback][-1] == "fail"


def test_the_pool_is_torchs_own_and_counts_its_segments_alone(monkeypatch):
    """``use_mem_pool`` is the installed torch's; what it calls is recorded."""
    calls = []
    for name in (
        "_cuda_beginAllocateCurrentThreadToPool",
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
    ):
        monkeypatch.setattr(
            torch.cuda.memory, name, lambda *args, name=name: calls.append((name, *args))
        )
    segments = [
        {"device": 1, "total_size": 20},
        {"device": 1, "total_size": 2},
        {"device": 0, "total_size": 100},
    ]
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", {(0, 7): segments}.get)
    with MemoryProbe().private_pool(torch.device("cuda", 1)) as reserved:
        assert reserved() == 22
        assert calls == [("_cuda_beginAllocateCurrentThreadToPool", 1, (0, 7))]
    assert calls[1:] == [
        ("_cuda_endAllocateToPool", 1, (0, 7)),
        ("_cuda_releasePool", 1, (0, 7)),
    ]


def test_waiting_for_the_device_is_bounded(monkeypatch):
    class Event:
        left = 2

        def record(self, stream):
            assert stream == "the current one"

        def query(self):
            Event.left -= 1
            return Event.left < 0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current one")
    assert MemoryProbe().synchronize(GPU, 10.0)
    Event.left = 10**9
    assert not MemoryProbe().synchronize(GPU, 0.02)


@pytest.fixture
def torch_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    """torch's rule, by which a cache is never emptied under a capture, or beside an open pool."""
    captures, pools = Captures(), []
    captures.install(monkeypatch)

    def empty_cache() -> None:
        assert not captures.recording, "captures_underway.empty() INTERNAL ASSERT FAILED"
        assert not pools, "captures_underway.empty() INTERNAL ASSERT FAILED"

    @contextmanager
    def use_mem_pool(pool, device):
        pools.append(pool)
        yield
        pools.remove(pool)

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(MemoryProbe, "synchronize", lambda *_: True)
    yield captures
    captures.check_clean()


@contextmanager
def capturing(captures: Captures) -> Iterator[threading.Event]:
    """Another thread captures until the event is set, or the context ends."""
    begun, over = threading.Event(), threading.Event()

    def run() -> None:
        if captures.recording:
            begun.set()
            over.wait(10)

    capturer = CudaGraphCapturer(torch.device("cpu", 0))
    thread = threading.Thread(target=capturer.capture, args=(run,))
    thread.start()
    assert begun.wait(10)
    try:
        yield over
    finally:
        over.set()
        thread.join()


def use_pool() -> None:
    with MemoryProbe().private_pool(GPU):
        pass


@pytest.mark.parametrize(
    "work", [lambda: MemoryProbe().empty_cache(GPU), use_pool], ids=["empty_cache", "pool"]
)
def test_memory_waits_for_another_engines_capture(torch_state: Captures, work) -> None:
    done: list[bool] = []

    def run() -> None:
        work()
        done.append(True)

    with capturing(torch_state) as over:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(0.1)
        assert not done
        over.set()
        thread.join(10)
    assert done == [True]


def test_a_cache_is_not_emptied_beside_an_open_pool(torch_state: Captures) -> None:
    with MemoryProbe().private_pool(GPU), pytest.raises(TimeoutError, match=r"more than 0\.05 s"):
        MemoryProbe().empty_cache(GPU, 0.05)
    MemoryProbe().empty_cache(GPU, 0.05)


def test_release_does_not_wait_for_hung_capture(torch_state: Captures, monkeypatch, caplog) -> None:
    monkeypatch.setattr(memory, "RELEASE_TIMEOUT_SECONDS", 0.05)
    with capturing(torch_state):
        release_cached_memory(GPU)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "another engine captured" in record.getMessage()
    caplog.clear()
    release_cached_memory(GPU)
    assert not caplog.records


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA out of memory."), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate"), True),
        (ILLEGAL, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `gemm`"), False),
        (RuntimeError("out of resource: shared memory, Required: 200000"), False),
        (ValueError("the prompt is out of memory lane"), False),
    ],
)
def test_errors_that_a_smaller_step_may_avoid(error, is_memory):
    assert is_out_of_memory(error) == is_memory
