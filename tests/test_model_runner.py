"""Model runners: sizes, refusals, threads, memory."""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.core.executor import Executor, StepOutOfMemoryError
from asyncllm.errors import KVCacheTooSmallError
from asyncllm.gpu import cache_sizing, devices
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.calibration import (
    GPU_STEP_TARGET_SECONDS,
    calibrate_token_budget,
    find_min_async_tokens,
)
from asyncllm.gpu.graph.forward_pass import ForwardPass
from asyncllm.gpu.ops.registry import NativeOpsChoice
from asyncllm.sampling_params import SamplingParams
from tests.driver import Driver, state_of
from tests.dummy_runner import LARGE, MODEL, make


def test_defaults_on_a_cpu():
    runner = make()
    assert isinstance(runner, Executor)
    info = runner.info
    assert (info.block_size, info.max_num_seqs) == (32, 64)
    # By how long its steps take.
    assert info.pipeline_depth in (1, 2)
    assert (info.max_model_len, info.vocab_size) == (256, 128)
    # Twice what 64 sequences of 256 tokens need, and the null block.
    assert info.num_blocks == 2 * 64 * 8 + 1


def test_num_blocks_counts_usable_blocks_and_bounds_context():
    info = make(num_blocks=5, block_size=16).info
    assert info.num_blocks == 6
    assert info.max_model_len == 80


def test_kv_cache_memory_is_the_whole_allocation():
    per_block = 2 * 2 * 2 * 8 * 16 * 4
    runner = make(kv_cache_memory=10 * per_block + 5, block_size=16)
    assert runner.info.num_blocks == 10
    assert state_of(runner).cache.tensor.nbytes == 10 * per_block


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_blocks": 3, "max_model_len": 256}, ("3 blocks", "8 blocks", "num_blocks")),
        ({"kv_cache_memory": 100}, ("0 blocks", "one block", "kv_cache_memory", "16384")),
        ({"kv_cache_memory": "40KB", "max_model_len": 200}, ("3 blocks", "7 blocks", "65536")),
    ],
)
def test_too_small_a_cache_is_refused_with_the_numbers(fields, words):
    with pytest.raises(KVCacheTooSmallError) as error:
        make(**fields)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("fields", [{"kv_cache_memory": "999TiB"}, {"num_blocks": 2**31 - 2}])
def test_impossible_cache_size_is_refused_with_its_size(fields):
    with pytest.raises(KVCacheTooSmallError, match=r"a KV cache of \d{13,} bytes cannot") as caught:
        make(block_size=2**16, **fields)
    assert "kv_cache_memory or num_blocks" in str(caught.value)


def test_available_memory_decides_where_nothing_is_set(monkeypatch):
    monkeypatch.setattr(cache_sizing, "available_memory", lambda: 4 * 2**20)
    runner = make(attention_backend="torch")
    assert state_of(runner).cache.tensor.nbytes == 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_an_unused_cache_takes_no_memory():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    runner = make(kv_cache_memory="2GiB", dtype="bfloat16")
    cache = state_of(runner).cache.tensor
    assert cache.nbytes > 2**31 - 2**20
    assert cache.dtype == torch.bfloat16
    assert cache.data_ptr() % 64 == 0
    driver = Driver(runner)
    driver.run([driver.add([1, 2, 3], 3)])
    assert resident() - before < 2**28


def test_default_dtype(monkeypatch):
    cpu = torch.device("cpu")
    half = replace(LARGE, dtype="bfloat16")
    for able, native, model, expected in (
        (True, False, half, torch.bfloat16),
        (True, False, replace(LARGE, dtype="float16"), torch.bfloat16),
        (True, True, LARGE, torch.float32),
        (False, False, half, torch.float32),
        (False, True, half, torch.bfloat16),
        (True, True, replace(MODEL, dtype="bfloat16"), torch.float32),
    ):
        choice = NativeOpsChoice(native, "")
        monkeypatch.setattr(devices, "computes_in_bfloat16", lambda able=able: able)
        monkeypatch.setattr(devices, "choose_native_ops", lambda choice=choice: choice)
        assert devices.resolve_dtype("auto", model, cpu) == expected
        # Native ops do not run beside another backend's attention.
        other = expected if able else torch.float32
        assert devices.resolve_dtype("auto", model, cpu, "torch") == other
    assert devices.resolve_dtype("bfloat16", MODEL, cpu) == torch.bfloat16


def test_threads_belong_to_the_engine_thread_alone():
    main = torch.get_num_threads()
    seen: dict[str, int] = {}

    def engine() -> None:
        driver = Driver(make(num_threads=3, attention_backend="torch"))
        seq = driver.add([1, 2, 3], 2)
        driver.run([seq])
        seen["engine"] = torch.get_num_threads()

    def host(name: str) -> None:
        seen[name] = torch.get_num_threads()
        torch.set_num_threads(seen[name])  # what later threads begin with, said explicitly

    for target, args in ((host, ("before",)), (engine, ()), (host, ("after",))):
        thread = Thread(target=target, args=args)
        thread.start()
        thread.join()
    assert seen["engine"] == 3
    assert seen["before"] == seen["after"] != 3
    assert torch.get_num_threads() == main


def test_globals_are_left_alone():
    def state() -> tuple:
        return (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_rng_state().sum().item(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_float32_matmul_precision(),
        )

    before = state()
    driver = Driver(make(max_num_batched_tokens="auto"))
    driver.run([driver.add([1, 2, 3], 3, SamplingParams(seed=1))])
    assert state() == before


def test_the_hosts_defaults_do_not_reach_the_model():
    def output() -> list[int]:
        driver = Driver(make())
        seqs = [driver.add([1, 2, 3], 8), driver.add([4] * 40, 8, SamplingParams(seed=1))]
        driver.run(seqs, chunk=16)
        return [token for seq in seqs for token in seq.outputs]

    expected = output()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        assert output() == expected
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_a_step_without_rows_takes_releases():
    driver = Driver(make())
    seq = driver.add([1, 2, 3], 1, SamplingParams(seed=1, presence_penalty=1.0))
    driver.launch([(seq, 0)])
    driver.collect()
    state = state_of(driver.executor)
    assert state.sampler.state.stages.any()
    driver.release(seq)
    driver.launch([])
    assert driver.collect().token_ids == []
    assert not state.sampler.state.stages.any()


def test_collect_without_a_step_is_a_mistake():
    with pytest.raises(RuntimeError, match="no step"):
        make().collect()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("shape mismatch"),  # is itself
    ],
)
def test_out_of_memory_voids_the_step_and_no_more(monkeypatch, error):
    runner = make(async_scheduling=True, attention_backend="torch")
    expected = Driver(make(attention_backend="torch"))
    reference = expected.add([5, 6, 7], 6)
    expected.run([reference])
    driver = Driver(runner)
    seq = driver.add([5, 6, 7], 6)
    driver.launch([(seq, 0)])
    driver.launch([(seq, 0)])

    def fail(*_):
        raise error

    is_memory = "shape" not in str(error)
    with monkeypatch.context() as patch:
        patch.setattr(ForwardPass, "forward", fail)
        with pytest.raises(StepOutOfMemoryError if is_memory else RuntimeError) as caught:
            runner.collect()
    assert isinstance(caught.value, StepOutOfMemoryError) == is_memory
    assert ("3 tokens" if is_memory else "shape mismatch") in str(caught.value)
    runner.discard()
    driver.in_flight.clear()
    driver.release(seq)
    seq.in_flight = 0
    driver.run([seq])
    assert seq.outputs == reference.outputs


def test_one_bad_row_leaves_the_others():
    def broken(output, logits):
        raise ZeroDivisionError("on purpose")

    driver = Driver(make())
    good = driver.add([1, 2, 3, 4], 5)
    bad = driver.add([1, 2, 3], 5, SamplingParams(seed=1, logits_processors=[broken]))
    alone = driver.add([1, 2, 3, 4], 5)
    driver.run([alone])
    driver.run([good, bad])
    assert isinstance(bad.error, ZeroDivisionError)
    assert good.outputs == alone.outputs
    # An application that keeps the error keeps none of the step's tensors.
    frames = [frame for frame, _ in traceback.walk_tb(bad.error.__traceback__)]
    assert frames[-1].f_code is broken.__code__
    assert not any(frame.f_locals for frame in frames)


@pytest.mark.parametrize(
    ("per_token", "expected"), [(1e-5, 2048), (2e-4, 992), (1e-3, 192), (0.1, 64)]
)
def test_token_budget_takes_a_fifth_of_a_second(per_token, expected):
    sizes = []

    def time_step(count: int) -> float:
        sizes.append(count)
        return 1e-4 + per_token * count

    budget = calibrate_token_budget(time_step)
    assert budget == expected
    assert budget % 32 == 0
    assert sum(1e-4 + per_token * size for size in sizes) < max(0.3, 96 * per_token)


def test_gpu_token_budget_takes_50_ms():
    sizes, first = [], set()

    def time_step(count: int) -> float:
        """A first step of a size loads something."""
        sizes.append(count)
        slow = 0.3 if count not in first else 0.0
        first.add(count)
        return 1e-3 + 23e-6 * count + slow

    options = {"target_seconds": GPU_STEP_TARGET_SECONDS, "repeats": 2}
    assert calibrate_token_budget(time_step, max_budget=8192, **options) == 2112
    timed = 8, 32, 64, 128, 256, 512, 1024, 2048
    assert sizes == [1, *(size for size in timed for _ in range(2))]
    assert calibrate_token_budget(time_step, max_budget=300, **options) == 300
    assert calibrate_token_budget(lambda count: 1e-6 * count, max_budget=8192, **options) == 8192


@pytest.mark.parametrize(("backend", "quantization", "threads"), [
    ("native", None, 1), ("native", "awq", 2), ("torch", None, 2),
])  # fmt: skip
def test_torch_has_one_thread_while_native_threads_pack(backend, quantization, threads):
    counts = set()

    def progress(*_, **stage):
        counts.add(torch.get_num_threads())

    def build():
        config = EngineConfig(
            load_format="dummy", device="cpu", max_num_batched_tokens=64, num_threads=2,
            attention_backend=backend,
        )  # fmt: skip
        build_model_runner(config, replace(MODEL, quantization=quantization), progress).close()

    # The number is a thread's own.
    thread = Thread(target=build)
    thread.start()
    thread.join()
    assert counts == {threads}


@pytest.mark.parametrize(
    ("fixed", "per_token", "sizes"),
    [(0.12, 1e-3, [1, 8]), (0.05, 2e-3, [1, 8, 32]), (0.0, 1e-3, [1, 8, 32, 64, 128])],
)
def test_slow_model_is_timed_with_few_tokens(fixed, per_token, sizes):
    timed = []

    def time_step(count: int) -> float:
        timed.append(count)
        return fixed + per_token * count

    budget = calibrate_token_budget(time_step)
    assert timed == sizes
    # As if the first of them had been the step of 32 tokens.
    seconds = fixed + per_token * max(32, sizes[-1])
    assert budget == max(64, int(max(32, sizes[-1]) * 0.2 / seconds) // 32 * 32)


def test_step_timed_for_budget_is_reused_for_depth():
    times = iter([0.004, 0.004, 0.004])
    assert find_min_async_tokens(lambda _: next(times), 64, {1: 0.5, 8: 0.001}) == 8
    assert next(times, None) is None
    assert find_min_async_tokens(lambda _: pytest.fail("not to be run"), 64, {8: 0.011}) is None
    assert find_min_async_tokens(lambda count: 0.02 * count, 4, {8: 0.001}) is None


@pytest.mark.parametrize(
    ("seconds", "found", "calls"),
    [
        ([0.5, 0.001, 0.019, 0.004, 0.02], 8, [1, 8, 64, 64, 64]),
        ([0.5, 0.001, 0.01, 0.02, 0.011], 3, [1, 8, 64, 64, 64]),
        ([0.5, 0.001, 1e-5, 1e-5, 1e-5], 3200, [1, 8, 64, 64, 64]),
        ([0.5, 0.001, 0.019, 0.02, 0.011], None, [1, 8, 64, 64, 64]),
        ([0.5, 0.001, 0.02], None, [1, 8, 64]),
        ([0.5, 0.011], None, [1, 8]),
    ],
)
def test_depth_is_two_where_full_step_takes_ten_milliseconds(seconds, found, calls):
    sizes: list[int] = []
    times = iter(seconds)

    def time_step(count: int) -> float:
        sizes.append(count)
        return next(times)

    assert find_min_async_tokens(time_step, 64, {}) == found
    assert sizes == calls


@pytest.mark.parametrize(("asked", "depth"), [(None, (1, 2)), (False, (1,)), (True, (2,))])
def test_the_pipeline_depth(asked, depth):
    runner = make(attention_backend="native", async_scheduling=asked)
    assert runner.info.pipeline_depth in depth
    assert make(attention_backend="torch", async_scheduling=asked).info.pipeline_depth == depth[0]


def test_the_budget_is_measured_on_a_short_context():
    runner = make(max_num_batched_tokens="auto", max_model_len=20, max_num_seqs=2)
    assert 64 <= runner.info.max_num_batched_tokens <= 2048


def test_buffers_hold_no_more_tokens_than_a_step():
    runner = make(max_num_batched_tokens=2**31 - 1, max_model_len=20, max_num_seqs=2)
    assert runner.info.max_num_batched_tokens == 40
