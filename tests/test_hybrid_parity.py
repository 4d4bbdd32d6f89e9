"""Gated delta rules beside attention on the engine's own decoder, against transformers' generate,
in float32."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.batch.state_rows import StateRows
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.layers import AttentionMixer
from asyncllm.gpu.models.linear_attention import GatedDeltaMixer
from asyncllm.gpu.state_cache import StateSpec
from asyncllm.gpu.weights import load_weights
from tests.driver import Driver, state_of
from tests.fakes import engine_on
from tests.families import EXPERTS, GATED_DELTA, TINY, make
from tests.model_configs import read
from tests.native_library import context
from tests.parity import (
    OUTPUT,
    Case,
    case_loader,
    check,
    check_fails,
    check_reference,
    check_sizes,
    run_everything,
    run_matrix,
    run_static_step,
    setting,
    with_tensors,
)
from tests.recurrent_checkpoint import MISTAKES
from tests.reference import check_tokens, generate
from tests.slow import slow_but

SHARED = {**EXPERTS, "shared_expert_intermediate_size": 56}
LINEAR, FULL = "linear_attention", "full_attention"

CASES: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"config": "Qwen3_5TextConfig", "seed": 3, **GATED_DELTA},
    "Qwen3_5Moe": {
        "config": "Qwen3_5MoeTextConfig",
        **GATED_DELTA,
        **SHARED,
        "gain": 1.0,
        "seed": 2,
    },
    "Qwen3Next": {"seed": 1, **GATED_DELTA, **SHARED},
}
"""One of each family; the last layer of each has a state."""

VARIANTS: dict[str, dict[str, Any]] = {
    "Qwen3_5-sizes": {
        **CASES["Qwen3_5"], "linear_num_key_heads": 1, "linear_num_value_heads": 3,
        "linear_key_head_dim": 12, "linear_value_head_dim": 36, "linear_conv_kernel_dim": 3,
        "layer_types": [FULL, LINEAR, FULL], "attention_bias": True, "tie_word_embeddings": True,
        "embedding": 0.05, "seed": 0,
    },
    "Qwen3_5-interval": {
        **CASES["Qwen3_5"], "layer_types": None, "num_hidden_layers": 4, "gain": 1.1, "seed": 6,
    },
    "Qwen3_5-attention": {**CASES["Qwen3_5"], "layer_types": [FULL] * 3, "seed": 0},
    "Qwen3_5Moe-whole": {
        **CASES["Qwen3_5Moe"], "seed": 0,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
        },
    },
    "Qwen3Next-dense-layers": {
        **CASES["Qwen3Next"], "mlp_only_layers": [1], "norm_topk_prob": False,
        "linear_num_key_heads": 4, "seed": 3, "shard": "60KB",
    },
}  # fmt: skip


def make_case(path: Path, name: str) -> Case:
    settings = VARIANTS.get(name) or CASES[name]
    model = make(path, f"{name.partition('-')[0]}-native", **settings)
    return Case.of(path, model)


@pytest.fixture(scope="module")
def load_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return case_loader(tmp_path_factory, make_case)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("native", name) for name in CASES),
        ("torch", "Qwen3_5"),
        *(pytest.param("torch", name, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_equals_transformers(load_case, name, backend):
    """In a batch, in chunks, and after a preemption; natively as one program."""
    if backend == "native":
        context()
    case = load_case(name)
    check_reference(case)
    check_sizes(case.config)
    runner = case.runner(attention_backend=backend)
    if backend == "native":
        assert runner.execution.startswith("one native program of")
    assert state_of(runner).model.states[:2] == [
        StateSpec((3, 64)),
        StateSpec((4, 8, 8), torch.float32),
    ]
    run_everything(case, runner)


@pytest.mark.parametrize("name", slow_but(CASES, "Qwen3_5"))
def test_the_static_step_equals_transformers(load_case, name):
    run_static_step(load_case(name))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", [*CASES, *VARIANTS])
def test_matrix(load_case, name, backend):
    run_matrix(load_case(name), backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *VARIANTS])
def test_transformers_modules_agree(load_case, name):
    case = load_case(name)
    run_everything(case, case.runner(model_impl="transformers"))


def test_slots_are_used_again(load_case):
    context()
    case = load_case("Qwen3_5")
    runner = case.runner(attention_backend="native")
    for tensor in state_of(runner).cache.states.tensors:
        tensor.fill_(torch.nan)
    for order in ((0, 1, 2), (2, 0, 1)):
        driver = Driver(runner)
        seqs = [driver.add(case.prompts[index], OUTPUT) for index in order]
        driver.run(seqs, chunk=6)
        check(case, seqs, list(order))


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("ahead", slow_but([False, True], True))
@pytest.mark.parametrize("name", CASES)
async def test_prefixes_are_found_behind_recorded_steps(load_case, name: str, ahead: bool) -> None:
    """States are copied between native programs, from the third request on for all of a prefix."""
    context()
    case = load_case(name)
    runner = case.runner(attention_backend="native", block_size=8, async_scheduling=ahead)
    draw = random.Random(name)
    shared = [draw.randrange(250) for _ in range(24)]
    prompts = [[*shared, *(draw.randrange(250) for _ in range(1 + i))] for i in range(6)]
    expected = [generate(case.model, prompt, 8) for prompt in prompts]
    cached = []
    async with engine_on(runner) as engine:

        async def tokens(prompt: list[int]) -> list[int]:
            stream = engine.stream(prompt, temperature=0.0, max_tokens=8, ignore_eos=True)
            result = await stream.result()
            cached.append(result.usage.cached_tokens)
            return list(result.token_ids)

        found = [await tokens(prompt) for prompt in prompts]
        assert cached[:1] + cached[2:] == [0, 24, 24, 24, 24]
        found += await asyncio.gather(*map(tokens, prompts))
    for outputs, one in zip(found, expected * 2, strict=True):
        check_tokens(outputs, one)


def test_a_quantisation_leaves_gates_as_they_are(load_case):
    """The decay of a state is exponential in their outputs."""
    context()
    case = load_case("Qwen3Next")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    mixers = [
        state_of(case.runner(attention_backend="native", quantization=name)).model.layers[0].mixer
        for name in (None, "int8")
    ]
    plain, rounded = (mixer.gates(x) for mixer in mixers)
    assert torch.equal(plain, rounded)
    plain, rounded = (mixer.qkvz(x) for mixer in mixers)
    assert 1e-4 < (plain - rounded).norm() / plain.norm() < 0.03


def _layers(runner: ModelRunner) -> list[Any]:
    return list(state_of(runner).model.layers)


def _mixers(runner: ModelRunner, kind: type) -> list[Any]:
    return [each.mixer for each in _layers(runner) if isinstance(each.mixer, kind)]


def _shifted_inputs(runner: ModelRunner) -> None:
    """The convolution's inputs one token older than they are."""
    for mixer in _mixers(runner, GatedDeltaMixer):

        def shifted(x: Any, state: Any, rows: Any, conv: Any = mixer.conv) -> Any:
            out = conv(x, state, rows)
            state.copy_(state.roll(1, 1))
            return out

        mixer.conv = shifted


def _no_output_gate(runner: ModelRunner) -> None:
    for mixer in _mixers(runner, AttentionMixer):
        mixer.gate = replace(mixer.gate, multiply=lambda x, gate: x)


def _no_z(runner: ModelRunner) -> None:
    for mixer in _mixers(runner, GatedDeltaMixer):
        norm = mixer.norm
        mixer.norm = lambda x, gate, norm=norm: norm(x, torch.full_like(gate, 1.278))


def _no_decay(runner: ModelRunner) -> None:
    for mixer in _mixers(runner, GatedDeltaMixer):
        mixer.delta.decay_parameters.log_rate.fill_(-torch.inf)


def _rounded_decay(runner: ModelRunner) -> None:
    """As a checkpoint in bfloat16 has it: the least of these mistakes, where noise is greatest."""
    for mixer in _mixers(runner, GatedDeltaMixer):
        rate = mixer.delta.decay_parameters.log_rate
        rate.copy_(rate.bfloat16())


def _no_offset(runner: ModelRunner) -> None:
    for layer in _layers(runner):
        layer.input_norm.weight -= 1


def _all_rotated(runner: ModelRunner) -> None:
    decoder = state_of(runner).model
    decoder.ropes = [rope._replace(rotary_dim=None) for rope in decoder.ropes]
    decoder.set_max_positions(256)


MUTATIONS: dict[str, tuple[str, Callable[[ModelRunner], None]]] = {
    "inputs shifted by one": ("Qwen3_5", _shifted_inputs),
    "no gate on attention": ("Qwen3_5", _no_output_gate),
    "no gate on the rule": ("Qwen3_5", _no_z),
    "no decay": ("Qwen3Next", _no_decay),
    "a decay in bfloat16": ("Qwen3Next", _rounded_decay),
    "norms of w": ("Qwen3_5", _no_offset),
    "RoPE on all of the head": ("Qwen3_5", _all_rotated),
    "no gate on the shared expert": ("Qwen3_5Moe", setting(_layers, "mlp.gate", None)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_mistakes(load_case, mutation):
    name, mutate = MUTATIONS[mutation]
    case = load_case(name)
    runner = case.runner()
    with torch.inference_mode():
        mutate(runner)
    check_fails(case, runner)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_wrong_states(load_case, monkeypatch, mistake):
    of = StateRows.of
    monkeypatch.setattr(StateRows, "of", lambda inputs: MISTAKES[mistake](of(inputs)))
    case = load_case("Qwen3_5")
    runner = case.runner(max_num_seqs=4)
    with pytest.raises(AssertionError):
        for _ in range(2):
            driver = Driver(runner)
            seqs = [driver.add(prompt, OUTPUT) for prompt in case.prompts]
            driver.run(seqs, chunk=7)
            check(case, seqs, [0, 1, 2])


def test_predictors_of_further_tokens_are_left_out(load_case, tmp_path):
    case, cpu = load_case("Qwen3_5"), torch.device("cpu")
    config = with_tensors(case, tmp_path, {"mtp.fc.weight": torch.zeros(4)})
    list(load_weights(config, torch.float32, cpu))
    config = with_tensors(case, tmp_path, {"model.layers.1.linear_attn.A_log": torch.zeros(4)})
    with pytest.raises(ModelLoadError, match=r"linear_attn\.A_log' is none of"):
        list(load_weights(config, torch.float32, cpu))


QWEN = TINY | {"model_type": "qwen3_5_text", "head_dim": 16}
MOE = TINY | {"model_type": "qwen3_5_moe_text", "head_dim": 16, **SHARED}
MOE.pop("intermediate_size")


@pytest.mark.parametrize(
    ("config", "fields", "said"),
    [
        (QWEN, {"linear_num_key_heads": 3}, "linear_num_value_heads is 32, expected a multiple"),
        (QWEN, {"linear_num_value_heads": 0}, "linear_num_value_heads is 0, expected"),
        (QWEN, {"linear_num_key_heads": 5000}, "linear_num_key_heads is 5000, expected .* 1024"),
        (QWEN, {"linear_key_head_dim": 0}, "linear_key_head_dim is 0, expected"),
        (QWEN, {"linear_value_head_dim": 10**6}, "linear_value_head_dim is 1000000, expected"),
        (QWEN, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, expected .* 2"),
        (QWEN, {"attn_output_gate": False}, "attn_output_gate is False, expected true"),
        (QWEN, {"full_attention_interval": 0}, "full_attention_interval is 0, expected"),
        (QWEN, {"full_attention_interval": 4}, "interval is 4, expected .* num_hidden_layers=3"),
        (MOE, {"full_attention_interval": None}, "interval is missing, expected at most num_hid"),
        (QWEN, {"layer_types": [LINEAR] * 3}, "layer_types is .*full_attention, at least once"),
        (QWEN, {"layer_types": [FULL]}, "layer_types is .*num_hidden_layers=3"),
        (QWEN, {"layer_types": [FULL, "mamba", FULL]}, "layer_types is .*full_attention or linear"),
        (QWEN, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh', expected"),
        (QWEN, {"intermediate_size": None}, "intermediate_size is missing"),
        (MOE, {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, expected at most num_exp"),
        (MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    ],
)  # fmt: skip
def test_bad_numbers_are_named(tmp_path, config, fields, said):
    config = config | {"full_attention_interval": 3}
    good = read(tmp_path, config)
    assert good.linear_attention is not None
    assert good.linear_attention.layers == (True, True, False)
    assert (good.experts is not None) == ("num_experts" in config)
    with pytest.raises(ModelLoadError, match=said):
        read(tmp_path, config | fields)
