"""Recurrent states behind cached prefixes, against transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from asyncllm import EngineConfig, InvalidRequestError
from asyncllm.core.batch import StepBatch
from asyncllm.core.scheduler import Scheduler
from asyncllm.core.state_snapshots import StateSnapshots
from asyncllm.errors import EngineError
from asyncllm.gpu import memory
from asyncllm.gpu.cache_sizing import choose_num_state_snapshots
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.graph.graph_replay import GraphPlan
from asyncllm.gpu.graph.step_queue import StepQueue
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.memory import MemoryProbe
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateCache, StateSpec
from asyncllm.gpu.step_runner import StepRunner
from tests.driver import state_of
from tests.families import make
from tests.integrity import check_scheduler
from tests.recurrent_checkpoint import Checkpoint
from tests.reference import Expected, check_tokens, generate
from tests.scheduler_rig import Rig
from tests.static_runner import CPU, LateStream, TraceRecorder, run_late

BASE = [5, 6, 7, 8, 9, 10, 11, 100, 3, 9, 41, 7]
OUTPUT = 4


class Hybrid(Checkpoint):
    """Short convolutions before a gated delta rule, and attention, unless it is said otherwise;
    blocks of one token."""

    def __init__(self, path, family: str = "Qwen3_5") -> None:
        self.path, self.model = path, make(path, family)
        self.known: dict[tuple[int, ...], Expected] = {}

    def expect(self, prompt: list[int], count: int) -> Expected:
        key = tuple(prompt)
        if key not in self.known or len(self.known[key].tokens) < count:
            self.known[key] = generate(self.model, prompt, count)
        return self.known[key].first(count)

    def runner(self, **overrides: Any) -> ModelRunner:
        return super().runner(**{"block_size": 1, "num_state_snapshots": 20} | overrides)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("qwen"))


class ModelRig(Rig):
    """The scheduler on a model's runner, driven by hand."""

    def __init__(self, hybrid: Hybrid, runner: ModelRunner, interval: int = 3) -> None:
        self.hybrid, self.info, self.arrival_index = hybrid, runner.info, 0
        self.executor: Any = runner
        self.scheduler = Scheduler(runner.info)
        self.in_flight = []
        kv, count = self.scheduler.kv, runner.info.num_state_snapshots
        sizes = [group.block_size for group in self.info.kv_groups]
        kv.states = StateSnapshots(count, sizes, interval)

    def add(self, prompt, max_tokens=OUTPUT, **options):
        one = super().add(prompt, max_tokens, **options)
        one.sampling = one.sampling.resolve({}, {}, lambda: 0)
        return one

    def finish_all(self, *expected, limit=2000):
        """With as many steps in flight as there may be."""
        while self.scheduler.has_work() or self.in_flight:
            if len(self.in_flight) == self.info.pipeline_depth or self.launch() is None:
                self.collect()
            check_scheduler(self.scheduler)
        self.expect(*expected)

    def _expect(self, request):
        prompt = request.token_ids[: request.num_prompt_tokens]
        expected = self.hybrid.expect(prompt, request.num_output_tokens)
        check_tokens(request.output_token_ids, expected)


def plain(hybrid: Hybrid, **overrides: Any) -> ModelRig:
    return ModelRig(hybrid, hybrid.runner(**overrides))


def late(hybrid: Hybrid, capturer=GraphCapturer, **overrides: Any) -> ModelRig:
    """State between steps on a device that runs as late as it may."""
    runner, stream = hybrid.runner(**overrides), LateStream()
    state: Any = state_of(runner)
    state.model.ops = TorchOps()
    info = replace(runner.info, pipeline_depth=2)
    graphs = GraphPlan(capturer(), (4,))
    made = ModelRunner(state.model, state.cache, info, stream=stream, graphs=graphs)
    return ModelRig(hybrid, run_late(made))


RIGS = {
    "depth 1": plain,
    "depth 2": partial(plain, async_scheduling=True),
    "late device": late,
    "graphs that bake everything in": partial(late, capturer=TraceRecorder),
}
LENGTHS = {"depth 1": [1, 12], "depth 2": [9], "late device": [4]}


def hit_at(rig: ModelRig, lengths: Iterable[int]) -> None:
    """Of three prompts that share a prefix of each length the third finds it; beside a request
    that decodes throughout."""
    for length in lengths:
        rig.scheduler.kv.reset_prefix_cache()
        company = rig.add([200 + length, 17], max_tokens=9)
        rig.step()
        found = []
        for tail in ([20, 21, 22], [30, 31], [40]):
            found.append(rig.add(BASE[:length] + tail))
            while not found[-1].is_finished:
                rig.step()
        rig.finish_all()
        assert found[2].num_cached_tokens == length
        rig.expect(company, *found)


def crowd(rig: ModelRig) -> None:
    """Outputs that others go on from, more requests than slots and blocks, and a failed step."""
    prompts = [[*BASE[:length], 50 + i] for i, length in enumerate((8, 8, 5, 12, 8, 5))]
    requests = [rig.add(prompt, max_tokens=9) for prompt in prompts]
    for _ in range(4):
        rig.launch()
        if len(rig.in_flight) == rig.info.pipeline_depth:
            rig.collect()
    rig.launch()
    rig.executor.discard()
    rig.scheduler.roll_back_steps(rig.in_flight)
    rig.in_flight.clear()
    rig.finish_all()
    requests += [rig.add([*one.token_ids[:14], 60], max_tokens=3) for one in requests]
    rig.finish_all(*requests)
    assert rig.scheduler.num_preemptions > 0
    assert rig.scheduler.kv.num_hit_tokens > 0


@pytest.mark.parametrize("name", LENGTHS)
def test_hits_of_some_lengths(hybrid, name):
    hit_at(RIGS[name](hybrid), LENGTHS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGS)
def test_hits_of_every_length(hybrid, name):
    hit_at(RIGS[name](hybrid), range(1, len(BASE) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mamba2", "FalconH1", "Lfm2"])
def test_states_of_other_kinds(tmp_path, family):
    """Mamba2 has no attention, and prefixes all the same: its blocks count tokens."""
    hit_at(plain(Hybrid(tmp_path, family)), [3, 8])


@pytest.mark.parametrize("name", LENGTHS)
def test_preemption_and_failed_steps(hybrid, name):
    crowd(RIGS[name](hybrid, num_blocks=40, max_num_batched_tokens=9))


def _not_loaded(monkeypatch) -> None:
    monkeypatch.setattr(StateCache, "load_snapshots", lambda self, loads: None)


def _neighbours(monkeypatch) -> None:
    load = StateCache.load_snapshots

    def wrong(self, loads):
        load(self, [(slot, snapshot % self.num_snapshots + 1) for slot, snapshot in loads])

    monkeypatch.setattr(StateCache, "load_snapshots", wrong)


def _saved_before_the_step(monkeypatch) -> None:
    forward = StepRunner._run_forward

    def early(self, step):
        if step.batch.state_saves:
            self.cache.states.save_snapshots(step.batch.state_saves)
        step.batch.state_saves = []
        forward(self, step)

    monkeypatch.setattr(StepRunner, "_run_forward", early)


def _saved_behind_the_next(monkeypatch) -> None:
    forward, former = StepRunner._run_forward, []

    def overtaken(self, step):
        saves, step.batch.state_saves = step.batch.state_saves, []
        forward(self, step)
        if former:
            self.cache.states.save_snapshots(former.pop())
        if saves:
            former.append(saves)

    monkeypatch.setattr(StepRunner, "_run_forward", overtaken)


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("depth 1", _not_loaded),
        ("depth 1", _saved_before_the_step),
        ("late device", _neighbours),
        ("late device", _saved_behind_the_next),
    ],
)
def test_mistakes_are_seen(hybrid, monkeypatch, name, break_it):
    rig = RIGS[name](hybrid)
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        hit_at(rig, [6])


def test_states_are_copied_between_slots_and_snapshots():
    specs = [StateSpec((3, 2)), StateSpec((4,), torch.bfloat16), StateSpec((5,))]
    cache = StateCache(specs, 3, torch.float32, CPU, num_snapshots=2)
    assert cache.num_bytes == 6 * (6 * 4 + 4 * 2 + 5 * 4)
    for tensor in cache.tensors:
        tensor.copy_(torch.arange(6).view(6, *[1] * (tensor.dim() - 1)).expand_as(tensor))
    cache.save_snapshots([(2, 1), (0, 2)])
    cache.load_snapshots([(1, 2)])
    for tensor in cache.tensors:
        assert tensor.flatten(1)[:, -1].tolist() == [0, 0, 2, 3, 2, 0]


def test_step_with_state_copies_does_not_run_ahead():
    """The native library's thread would run the next step before the host has saved them."""
    queue = StepQueue.__new__(StepQueue)
    queue.min_step_tokens = 1
    for copies in (dict(), dict(masked_rows=[0])):
        batch = StepBatch(0, [0], [0], [5], [True], num_tokens=5, **copies)
        assert queue.can_begin_early(LaunchedStep(batch), ()) is True
        for name in ("state_loads", "state_saves"):
            setattr(batch, name, [(0, 1)])
            assert queue.can_begin_early(LaunchedStep(batch), ()) is False
            setattr(batch, name, [])


def test_a_recorded_step_lies_between_its_copies(hybrid, monkeypatch):
    runner = hybrid.runner()
    state, found = state_of(runner), []

    state.forward_pass.is_recorded = True
    state.stream.submit = lambda step, is_early: found.append("run")
    for name in ("load_snapshots", "save_snapshots"):
        note = partial(lambda name, self, pairs: found.append((name, pairs)), name)
        monkeypatch.setattr(StateCache, name, lambda self, pairs, note=note: note(self, pairs))
    batch = StepBatch(0, [0], [0], [5], [True], state_loads=[(1, 2)], state_saves=[(0, 1)])
    state.begin(LaunchedStep(batch), is_early=False)
    assert found == [("load_snapshots", [(1, 2)]), "run", ("save_snapshots", [(0, 1)])]


class Probe(MemoryProbe):
    def __init__(self, free: int, total: int) -> None:
        self.free, self.total = free, total

    def free_and_total_bytes(self, device):
        return self.free, self.total


def chosen(device: str, free: int, total: int = 10**9, **settings: Any) -> int:
    config = EngineConfig(**settings)
    with mock.patch.object(memory, "GPU_MEMORY_PROBE", Probe(free, total)):
        return choose_num_state_snapshots(config, torch.device(device), 4, 1000)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_snapshots_by_memory(monkeypatch, device):
    free = 0
    monkeypatch.setattr("asyncllm.gpu.memory.available_memory", lambda: free)
    settings: dict[str, Any] = {"gpu_memory_utilization": 1.0}
    for free, count in ((10**6, 16), (5000 + 8 * 3500, 3), (5000 + 7999, 0), (5000, 0), (0, 0)):
        assert chosen(device, free, **settings) == count
        assert chosen(device, free, **settings, enable_prefix_caching=False) == 0
    free = 5000 + 8 * 3500
    assert chosen(device, free, **settings, kv_cache_memory=8000) == 2
    assert chosen(device, free, **settings, num_state_snapshots=28) == 28
    with pytest.raises(EngineError) as caught:
        chosen(device, free, **settings, num_state_snapshots=29)
    assert str(caught.value) == (
        "num_state_snapshots=29 needs 29000 bytes, 1000 a state; 28000 are free beside the "
        "weights and the states of max_num_seqs=4: lower it to 28 at most"
    )
    free = 12_000
    with pytest.raises(EngineError, match=r"enable_prefix_caching=True: .* 875 are for them"):
        chosen(device, free, **settings, enable_prefix_caching=True)


def test_gpu_memory_share_bounds_snapshots():
    # 60,000 of 100,000 may be used, and 50,000 are: 5,000 are the requests', 5,000 are left.
    assert chosen("cuda", 50_000, 100_000, gpu_memory_utilization=0.6) == 0
    assert chosen("cuda", 63_000, 100_000, gpu_memory_utilization=0.6) == 2


def test_a_large_memory_of_a_cpu_is_not_taken(monkeypatch):
    monkeypatch.setattr("asyncllm.gpu.memory.available_memory", lambda: 2**40)
    found = choose_num_state_snapshots(EngineConfig(), CPU, 64, 50 * 2**20)
    assert found == 20  # in 1 GiB


def test_settings_that_nothing_would_use(hybrid, tmp_path):
    with pytest.raises(InvalidRequestError) as caught:
        hybrid.runner(enable_prefix_caching=False)
    assert caught.value.param == "num_state_snapshots"
    assert 'expected "auto" with enable_prefix_caching=False' in str(caught.value)
    make(tmp_path, "Arcee")
    without = Checkpoint.__new__(Checkpoint)
    without.path = tmp_path
    with pytest.raises(InvalidRequestError, match='"auto": the model has no recurrent layers'):
        without.runner(num_state_snapshots=3)
