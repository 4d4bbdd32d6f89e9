"""Recurrent modules of transformers on the engine's state slots: rows, slots, failures, sizes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncllm import LLM, EngineConfig, InvalidRequestError, ModelLoadError
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.errors import EngineError
from asyncllm.gpu.batch.state_rows import StateRows
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.graph.graph_replay import GraphPlan
from asyncllm.gpu.memory import MemoryProbe, check_states_fit
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateSpec
from asyncllm.gpu.transformers_model import families
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.recurrent_probe import RecurrentCacheAdapter
from tests.driver import Driver, state_of
from tests.families import NEMOTRON_H, TINY, make
from tests.recurrent_checkpoint import MISTAKES, OUTPUT, PROMPTS, Checkpoint
from tests.reference import check_tokens
from tests.static_runner import CPU, LateStream, TraceRecorder, run_late
from tests.transformers_runner import SETTINGS, load


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Short convolutions."""
    return Checkpoint(tmp_path_factory.mktemp("lfm2"), "Lfm2")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Short convolutions before a gated delta rule."""
    return Checkpoint(tmp_path_factory.mktemp("qwen"), "Qwen3_5")


def run_twice(checkpoint: Checkpoint, runner: ModelRunner, depth: int = 1) -> None:
    """Decode rows beside prefill rows, prompts of a token among them; and again, in slots that
    others have used, at other places."""
    for order in ((0, 1, 2, 3), (2, 3, 1, 0)):
        driver = Driver(runner)
        seqs = [driver.add(prompt, OUTPUT) for prompt in PROMPTS]
        driver.launch([(seqs[index], min(3, len(PROMPTS[index]))) for index in order[:2]])
        driver.collect()
        driver.run([seqs[index] for index in order], chunk=3, depth=depth)
        checkpoint.check(seqs)


@pytest.mark.parametrize("depth", [1, 2])
def test_mixed_steps_in_used_slots(lfm2, depth):
    run_twice(lfm2, lfm2.runner(async_scheduling=depth == 2), depth)


def test_states_of_two_kinds(qwen):
    runner = qwen.runner()
    kernel, matrix = (64, 4), (4, 8, 8)
    pair = [StateSpec(kernel), StateSpec(matrix, torch.float32)]
    assert list(state_of(runner).model.states) == pair * 2
    tensors = state_of(runner).cache.states.tensors
    assert [tuple(t.shape) for t in tensors[:2]] == [(5 + 16, *kernel), (5 + 16, *matrix)]
    run_twice(qwen, runner)


def test_a_state_keeps_its_own_dtype(qwen):
    runner = qwen.runner(dtype="bfloat16")
    dtypes = [tensor.dtype for tensor in state_of(runner).cache.states.tensors[:2]]
    assert dtypes == [torch.bfloat16, torch.float32]
    driver = Driver(runner)
    seqs = [driver.add(prompt, 3) for prompt in PROMPTS]
    driver.run(seqs, chunk=3)
    assert all(len(seq.outputs) == 3 for seq in seqs)


def test_the_static_step_on_a_late_device(lfm2):
    plain, recorder = lfm2.runner(), TraceRecorder()
    stream: Any = LateStream()
    decoder, cache, info = state_of(plain).model, state_of(plain).cache, plain.info
    decoder.ops = TorchOps()
    info = replace(info, pipeline_depth=2)
    graphs = GraphPlan(recorder, (4,))
    runner = run_late(ModelRunner(decoder, cache, info, stream=stream, graphs=graphs))
    run_twice(lfm2, runner, depth=2)
    assert stream.most == 2
    assert len(recorder.traces) == 2  # up to the logits, and the sampling


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(lfm2, monkeypatch, mistake):
    of = StateRows.of
    monkeypatch.setattr(StateRows, "of", lambda inputs: MISTAKES[mistake](of(inputs)))
    with pytest.raises(AssertionError):
        run_twice(lfm2, lfm2.runner())


def test_nan_state_stays_in_its_slot(lfm2):
    """It may come of a request that fails; the next one in its slot starts from zeros."""
    runner = lfm2.runner()
    for tensor in state_of(runner).cache.states.tensors:
        tensor.fill_(torch.nan)
    run_twice(lfm2, runner)


def test_a_failed_step_leaves_no_state_advanced(lfm2, monkeypatch):
    """It failed behind the first recurrent layer, so that one state had taken the tokens in; what
    was in flight or in a slot starts over."""
    runner = lfm2.runner()
    driver = Driver(runner)
    seqs = [driver.add(prompt, OUTPUT) for prompt in PROMPTS]
    for count in (1, 1, 0, 0):
        live = [seq for seq in seqs if seq.known > seq.computed]
        driver.launch([(seq, count) for seq in live])
        driver.collect()
    before = [tensor.clone() for tensor in state_of(runner).cache.states.tensors]
    update = RecurrentCacheAdapter.get_conv_state

    def fail(self, layer_idx, state_idx=0):
        if layer_idx == 2:
            raise MemoryError
        return update(self, layer_idx, state_idx)

    driver.launch([(seq, 0) for seq in seqs])
    with monkeypatch.context() as patch:
        patch.setattr(RecurrentCacheAdapter, "get_conv_state", fail)
        with pytest.raises(StepOutOfMemoryError):
            runner.collect()
    changed = [
        not torch.equal(*pair)
        for pair in zip(before, state_of(runner).cache.states.tensors, strict=True)
    ]
    assert changed == [True, False]
    runner.discard()
    driver.in_flight.clear()
    driver.batches.clear()
    for seq in seqs:
        seq.in_flight = 0
        driver.release(seq)
    driver.run(seqs, chunk=4)
    lfm2.check(seqs)


def test_the_engine_preempts_and_runs_ahead(lfm2):
    settings = SETTINGS | {"num_blocks": 9, "async_scheduling": True, "max_num_batched_tokens": 9}
    prompts = PROMPTS + PROMPTS[:2]
    with LLM(lfm2.path, **settings, tokenizer=_tokenizer()) as llm:
        found = llm.generate(prompts, temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        assert llm.stats().num_preemptions > 0
    for one, expected in zip(found, lfm2.expected + lfm2.expected[:2], strict=True):
        check_tokens(one.token_ids, expected)


def _tokenizer() -> Path:
    import asyncllm

    return Path(asyncllm.__file__).parent / "demo_model"


@pytest.mark.parametrize(
    ("settings", "count", "words"),
    [
        ({}, 16, "16 more are for those of cached prefixes"),
        ({"num_state_snapshots": 3}, 3, "3 more are for those of cached prefixes"),
        ({"enable_prefix_caching": False}, 0, "prefixes are not cached"),
    ],
)
def test_the_memory_of_states_is_said(lfm2, caplog, settings, count, words):
    with caplog.at_level(logging.INFO, "asyncllm"):
        runner = lfm2.runner(**settings)
    states, info = state_of(runner).cache.states, runner.info
    assert states.num_bytes == (5 + count) * info.state_bytes
    assert (states.num_snapshots, info.num_state_snapshots) == (count, count)
    assert (
        f"recurrent states take {states.num_bytes} bytes, in a slot for each of max_num_seqs=4; "
        f"{words}"
    ) in caplog.text


class NearlyFull(MemoryProbe):
    def free_and_total_bytes(self, device):
        return 10_000, 100_000


@pytest.mark.parametrize("device", [CPU, torch.device("cuda:0")])
def test_states_that_do_not_fit(monkeypatch, device):
    monkeypatch.setattr("asyncllm.gpu.memory.available_memory", lambda: 10_000)
    monkeypatch.setattr("asyncllm.gpu.memory.GPU_MEMORY_PROBE", NearlyFull())
    check_states_fit(device, 9, 1000)
    with pytest.raises(EngineError) as caught:
        check_states_fit(device, 10, 1000)
    assert str(caught.value) == (
        "max_num_seqs=10 needs 11000 bytes for recurrent states, 1000 a slot; 10000 are free "
        "beside the weights: lower max_num_seqs to 9 at most"
    )


def test_states_are_taken_from_the_kv_cache(lfm2, monkeypatch):
    runner = lfm2.runner()
    reserved = []
    monkeypatch.setattr(
        "asyncllm.gpu.cache_sizing.cpu_cache_bytes",
        lambda reserve: reserved.append(reserve) or 2**20,
    )
    lfm2.runner(num_blocks=None)
    assert reserved == [state_of(runner).cache.states.num_bytes]


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("attention_backend", "triton", "'torch' or 'native': the model has no attention"),
        ("kv_cache_memory", 2**20, "expected None: the model has no attention"),
    ],
)
def test_settings_of_a_model_without_attention(tmp_path, name, value, accepted):
    config = transformers.Mamba2Config(
        num_heads=8, head_dim=16, state_size=8, n_groups=2, vocab_size=64, hidden_size=64,
        num_hidden_layers=2, eos_token_id=None,
    )  # fmt: skip
    config.architectures = ["Mamba2ForCausalLM"]
    config.save_pretrained(tmp_path)
    model = TransformersConfig.from_directory(tmp_path)
    assert model.max_position_embeddings == 131_072
    settings = SETTINGS | {"load_format": "dummy", "block_size": None, "num_blocks": None}
    runner = build_model_runner(EngineConfig(**settings), model)
    assert runner.info.block_size == 256
    assert runner.info.num_blocks == 1 + 2 * 4 * 512
    assert runner.info.max_model_len == 131_072
    with pytest.raises(InvalidRequestError) as caught:
        build_model_runner(EngineConfig(**settings | {name: value}), model)
    assert caught.value.param == name
    assert str(caught.value).endswith(accepted)


def refusal(path: Path, name: str, **settings: Any) -> str:
    getattr(transformers, name)(**TINY | settings).save_pretrained(path)
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    return str(caught.value)


def test_a_module_that_forgets_its_state_between_chunks(tmp_path):
    settings = {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2}
    words = refusal(tmp_path, "JambaConfig", **settings)
    assert (
        "JambaForCausalLM: model.layers.0.mamba (JambaMambaMixer) computes a chunk of 3 tokens "
        "without its recurrent state; expected states that go on. "
    ) in words


def test_a_pass_that_fails_names_the_layer(tmp_path, monkeypatch):
    def fail(self, hidden_states, **_):
        raise KeyError("on purpose")

    monkeypatch.setattr(transformers.models.lfm2.modeling_lfm2.Lfm2MLP, "forward", fail)
    words = refusal(tmp_path, "Lfm2Config", layer_types=["conv", "full_attention", "conv"])
    assert (
        "one pass of its code without weights fails in model.layers.0.feed_forward (Lfm2MLP): "
        "KeyError: 'on purpose'"
    ) in words


@pytest.mark.parametrize("low", [1e-30, 0.001])
def test_a_decode_that_differs_from_a_chunk(tmp_path, low):
    """Nemotron-H's own decode step leaves out a bound of its chunks, ``time_step_min``: where that
    has an effect, the result of a token would depend on how it was computed."""
    make(tmp_path, "NemotronH", **NEMOTRON_H, time_step_min=low)
    model = TransformersConfig.from_directory(tmp_path)
    if low < 0.001:
        runner = build_model_runner(EngineConfig(**SETTINGS), model)
        assert len(state_of(runner).model.states) == 2
        return
    with pytest.raises(ModelLoadError, match="its log-probabilities differ by"):
        build_model_runner(EngineConfig(**SETTINGS), model)


def test_another_architecture_is_checked_when_it_is_loaded(lfm2, monkeypatch, caplog):
    monkeypatch.setattr(families, "TESTED_ARCHITECTURES", frozenset())
    with caplog.at_level(logging.INFO, "asyncllm"):
        lfm2.runner()
    assert "is not among the tested architectures; in chunks and decode steps" in caplog.text
    of = StateRows.of
    monkeypatch.setattr(StateRows, "of", lambda inputs: MISTAKES["a state forgotten"](of(inputs)))
    with pytest.raises(ModelLoadError, match="its log-probabilities differ by"):
        lfm2.runner()
