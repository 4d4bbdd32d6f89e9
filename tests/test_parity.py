"""The runner against transformers' generate, for every architecture, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import AsyncLLMEngine, RequestError
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.ops import torch_attention, torch_rope
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.step_memory import StepMemory
from tests.checkpoints import DEMO_MODEL, make_checkpoint
from tests.driver import Driver, state_of
from tests.native_library import context
from tests.reference import Expected, Tally, compare, generate
from tests.slow import slow_but

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
    "qwen3-tied": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen2-tied": {
        "architecture": "Qwen2ForCausalLM",
        "tie_word_embeddings": True,
        "num_attention_heads": 6,
        "hidden_size": 96,
    },
    "llama": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 4},
    "llama-biases": {
        "architecture": "LlamaForCausalLM",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
    },
    "llama3-rope": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": LLAMA3,
        "shard": "40KB",
    },
    "llama-linear-rope": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    },
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": None},
    "mistral-sliding": {"architecture": "MistralForCausalLM", "sliding_window": 7},
    "qwen3-mixed-sliding": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
}
KINDS = ("qwen3-tied", "llama-biases", "qwen3-mixed-sliding")
"""Models of every schedule in every run."""
BATCHED = slow_but(CASES, *KINDS, "qwen3", "qwen2", "llama3-rope", "mistral-sliding")
"""Models of batches of mixed lengths: those in every run have each kind of layer, bias and RoPE."""

PROMPT_LENGTHS = (1, 5, 16, 33, 47, 8)
OUTPUT = 24


@dataclass
class Case:
    """A checkpoint, and what transformers generates from it."""

    config: ModelConfig
    prompts: list[list[int]]
    expected: list[Expected]
    backend: str = "torch"

    def runner(self, **overrides: Any) -> ModelRunner:
        settings = {
            "block_size": 4,
            "num_blocks": 600,  # of the three groups that some have
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "dtype": "float32",
            "device": "cpu",
            "num_threads": 1,
            "attention_backend": self.backend,
        }
        return build_model_runner(EngineConfig(**(settings | overrides)), self.config)


@pytest.fixture(scope="module")
def load_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def load(name: str) -> Case:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            model = make_checkpoint(path, **CASES[name])
            draw = random.Random(1)
            prompts = [[draw.randrange(256) for _ in range(n)] for n in PROMPT_LENGTHS]
            expected = [generate(model, prompt, OUTPUT) for prompt in prompts]
            made[name] = Case(ModelConfig.from_directory(path), prompts, expected)
        return made[name]

    return load


@pytest.fixture(scope="module", params=["torch", "native"])
def load_case(
    load_checkpoint: Callable[[str], Case], request: pytest.FixtureRequest
) -> Callable[[str], Case]:
    if request.param == "native":
        context()
    return lambda name: replace(load_checkpoint(name), backend=request.param)


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    print(f"{tally.tokens} tokens compared, {len(tally.ties)} parted at a tie")
    assert len(tally.ties) <= 1 + tally.tokens // 10_000


def check(case: Case, tally: Tally, seqs: list[Any], indices: list[int]) -> None:
    for seq, index in zip(seqs, indices, strict=True):
        compare(seq, case.expected[index], tally)


def check_all(case: Case, tally: Tally, runner: ModelRunner, **options: Any) -> None:
    """Every prompt in one batch."""
    driver = Driver(runner)
    seqs = [driver.add(prompt, OUTPUT) for prompt in case.prompts]
    driver.run(seqs, **options)
    check(case, tally, seqs, list(range(len(seqs))))


@pytest.mark.parametrize("name", BATCHED)
def test_outputs_are_varied_enough_to_mean_something(load_checkpoint, name):
    for expected in load_checkpoint(name).expected:
        assert len(set(expected.tokens)) >= 10


@pytest.mark.parametrize("name", slow_but(CASES, *KINDS))
def test_alone(load_case, tally, name):
    case = load_case(name)
    driver = Driver(case.runner())
    for index, prompt in enumerate(case.prompts):
        seq = driver.add(prompt, OUTPUT)
        driver.run([seq])
        check(case, tally, [seq], [index])


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("chunk", slow_but([0, 3, 10], 0, 3))
def test_batch_of_mixed_lengths(load_case, tally, name, chunk):
    case = load_case(name)
    check_all(case, tally, case.runner(), chunk=chunk)


@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding"])
@pytest.mark.parametrize("block_size", slow_but([1, 5, 32], 5))
def test_every_chunk_size(load_case, tally, name, block_size):
    case = load_case(name)
    driver = Driver(case.runner(block_size=block_size))
    for chunk in range(1, 34):
        seq = driver.add(case.prompts[3], 3)
        driver.run([seq], chunk=chunk)
        check(case, tally, [seq], [3])


@pytest.mark.parametrize("name", slow_but(CASES, *KINDS))
def test_arrivals_while_others_decode(load_case, tally, name):
    case = load_case(name)
    driver = Driver(case.runner())
    seqs = [driver.add(prompt, OUTPUT) for prompt in case.prompts]
    for joined in range(1, len(seqs) + 1):
        for _ in range(2):
            driver.launch([(seq, min(6, seq.known - seq.computed)) for seq in seqs[:joined]])
            driver.collect()
    driver.run(seqs)
    check(case, tally, seqs, list(range(len(seqs))))


@pytest.mark.parametrize("name", slow_but(CASES, *KINDS))
def test_prefix_hit(load_case, tally, name):
    case = load_case(name)
    driver = Driver(case.runner())
    first, second = driver.add(case.prompts[4], OUTPUT), driver.add(case.prompts[4], OUTPUT)
    driver.launch([(first, 0)])
    driver.collect()
    driver.share(first, second, num_blocks=11)
    driver.launch([(first, 0), (second, 0)])
    driver.collect()
    while not second.done:
        driver.launch([(seq, 0) for seq in (first, second) if not seq.done])
        driver.collect()
    check(case, tally, [first, second], [4, 4])


def test_prefix_hit_on_blocks_of_the_same_step(load_case, tally):
    case = load_case("qwen3")
    driver = Driver(case.runner())
    first, second = driver.add(case.prompts[4], OUTPUT), driver.add(case.prompts[4], OUTPUT)
    driver.launch([(first, 44)])
    shared = driver.executor
    driver.collect()
    assert shared.info.block_size == 4
    driver.release(first)
    first.tokens = list(first.prompt)
    # Both enter in one step: the second reads what the first writes in the same layer.
    driver.free_blocks.rotate(5)
    blocks = [driver.free_blocks.popleft() for _ in range(12)]
    first.blocks = [list(blocks)]
    second.blocks, second.computed = [blocks[:11]], 44
    driver.launch([(first, 0), (second, 0)])
    driver.collect()
    while not second.done:
        driver.launch([(first, 0), (second, 0)])
        driver.collect()
    check(case, tally, [first, second], [4, 4])


@pytest.mark.parametrize("name", slow_but(CASES, *KINDS))
def test_recompute_after_preemption(load_case, tally, name):
    case = load_case(name)
    driver = Driver(case.runner())
    seqs = [driver.add(prompt, OUTPUT) for prompt in case.prompts]
    for step in range(OUTPUT + 8):
        if step in (4, 9, 10):
            driver.release(seqs[step % len(seqs)])
        work = [(seq, min(20, seq.known - seq.computed)) for seq in seqs if not seq.done]
        if work:
            driver.launch(work)
            driver.collect()
    driver.run(seqs)
    check(case, tally, seqs, list(range(len(seqs))))


@pytest.mark.parametrize("name", slow_but(CASES, *KINDS))
@pytest.mark.parametrize("chunk", [0, 7])
def test_two_steps_in_flight(load_case, tally, name, chunk):
    case = load_case(name)
    runner = case.runner(async_scheduling=True)
    assert runner.info.pipeline_depth == 2
    check_all(case, tally, runner, chunk=chunk, depth=2)


def test_stale_nan_in_reused_blocks_does_not_spread(load_case, tally):
    case = load_case("qwen3")
    runner = case.runner()
    state_of(runner).cache.tensor[:, :, 1:] = torch.nan
    check_all(case, tally, runner, chunk=5)


def _no_rope(monkeypatch):
    rotary = TorchOps.rotary

    def unturned(self, table, positions):
        return rotary(self, table, torch.zeros_like(positions))

    monkeypatch.setattr(TorchOps, "rotary", unturned)


def _shifted_mask(monkeypatch):
    mask = torch_attention._make_mask

    def shifted(*rows):
        result = np.roll(mask(*rows), -1, -1)
        result[..., -1] = -np.inf
        result[..., 0] = 0.0
        return result

    monkeypatch.setattr(torch_attention, "_make_mask", shifted)


def _swapped_kv_heads(monkeypatch):
    write = torch_rope.write_kv

    def swapped(cache, slot_mapping, kv):
        heads = cache.shape[-2]
        order = [*reversed(range(heads)), *range(heads, 2 * heads)]
        write(cache, slot_mapping, kv[:, order])

    monkeypatch.setattr(torch_rope, "write_kv", swapped)


def _wrong_slot(monkeypatch):
    derive = StepMemory.derive_inputs

    def wrong(self, step):
        inputs = derive(self, step)
        if step.batch.starts[0] == 20:
            for group in inputs.groups:
                group.slot_mapping.add_(1)
        return inputs

    monkeypatch.setattr(StepMemory, "derive_inputs", wrong)


def _late_position(monkeypatch):
    derive = StepMemory.derive_inputs

    def late(self, step):
        inputs = derive(self, step)
        if step.batch.counts == [1]:
            inputs.positions.add_(1)
        return inputs

    monkeypatch.setattr(StepMemory, "derive_inputs", late)


@pytest.mark.parametrize(
    "mutate", [_no_rope, _shifted_mask, _swapped_kv_heads, _wrong_slot, _late_position]
)
def test_the_comparison_sees_mistakes(load_case, monkeypatch, mutate):
    case = load_case("qwen3")
    mutate(monkeypatch)
    driver = Driver(case.runner(attention_backend="torch"))
    seqs = [driver.add(case.prompts[2], OUTPUT)]
    if mutate is _shifted_mask:
        seqs.append(driver.add(case.prompts[3], OUTPUT))
    driver.run(seqs)
    with pytest.raises(AssertionError):
        check(case, Tally(), seqs, [2, 3][: len(seqs)])


def test_layers_of_a_checkpoint_are_as_asked(load_case, tmp_path: Path):
    assert load_case("qwen3-mixed-sliding").config.sliding_layers == (False, True, True)
    assert load_case("mistral-sliding").config.sliding_window == 7
    assert load_case("llama3-rope").config.rope.kind == "llama3"
    assert len(list(load_case("llama3-rope").config.path.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("backend", ["torch", "native"])
async def test_prompt_with_nan_logits_publishes_no_prefix(tmp_path: Path, backend: str):
    """Attention multiplies the values of later tokens by zero, and zero times NaN is NaN."""
    model = make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = torch.nan
    model.save_pretrained(tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "attention_backend": backend, "block_size": 8}
    prompt = [10 + i for i in range(44)]
    async with AsyncLLMEngine(tmp_path, tokenizer=DEMO_MODEL, **settings) as engine:
        greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
        expected = await engine.generate([*prompt, 60], **greedy)
        await engine.reset_prefix_cache()
        with pytest.raises(RequestError, match="not finite"):
            await engine.generate([*prompt, 9], **greedy)
        found = await engine.generate([*prompt, 60], **greedy)
        assert found.token_ids == expected.token_ids
