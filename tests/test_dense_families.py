"""The native decoder's families against transformers' generate, in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncllm.checkpoint.model_config import ModelConfig
from tests.dense_cases import BACKEND, CASES, SHAPES, load_case  # noqa: F401 - a fixture
from tests.driver import Driver
from tests.parity import (
    Case,
    check_fails,
    check_longrope,
    check_reference,
    run_everything,
    run_matrix,
)
from tests.static_runner import TraceRecorder, make_runner


def run_static(case: Case, depth: int, sizes: tuple[int, ...] = (1, 4)) -> None:
    """Through the decode step that is captured, its graph played by a trace of each bucket."""
    recorder = TraceRecorder()
    runner = make_runner(
        case.static_decoder(), capturer=recorder, depth=depth, sizes=sizes, max_num_seqs=4
    )
    run_everything(case, runner, 10)
    assert recorder.traces


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(load_case, name):
    """Through the recorded native step where it can be compiled."""
    case = load_case(name)
    check_reference(case)
    runner = case.runner()
    assert runner.execution.startswith("one native program") == (BACKEND == "native")
    run_everything(case, runner)


def test_traced_static_step(load_case):
    run_static(load_case("Ministral3"), 2, (4,))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", [*CASES, *SHAPES])
def test_matrix(load_case, name, backend):
    run_matrix(load_case(name), backend, (512, 4, 10))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *SHAPES])
def test_static_steps_and_transformers_modules(load_case, name):
    case = load_case(name)
    for depth in (1, 2):
        run_static(case, depth)
    run_everything(case, case.runner("transformers", attention_backend="torch"))


@pytest.mark.parametrize("backend", sorted({"torch", BACKEND}))
@pytest.mark.parametrize("name", ["Gemma3", "Granite", "Ministral3", "Olmo2"])
def test_bfloat16_error_is_within_transformers_own(load_case, name, backend):
    """To float32, of the token behind a prompt: norms in float32 and multipliers round alike."""
    case = load_case(name)
    driver = Driver(case.runner(dtype="bfloat16", attention_backend=backend))
    half = copy.deepcopy(case.model).to(torch.bfloat16)
    errors, bounds = [], []
    for prompt in case.prompts:
        seq = driver.add(prompt, 1)
        driver.run([seq], chunk=9)
        with torch.no_grad():
            exact, theirs = (
                model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
                for model in (case.model, half)
            )
        found = {each.token_id: each.logprob for each in seq.logprobs[0].top}
        errors.append(max(abs(exact[token].item() - found[token]) for token in found))
        bounds.append((exact - theirs).abs().max().item())
    assert max(errors) < 1.5 * max(bounds)


def test_longrope_chooses_its_factors_by_the_longest_sequence(load_case):
    check_longrope(load_case("Phi3-longrope"))


def _swapped(config: ModelConfig) -> ModelConfig:
    """Each kind of layer with the RoPE of the other."""
    full, sliding = (
        next(rope for rope, slides in zip(config.layer_ropes, config.sliding_layers, strict=True)
             if slides is which)
        for which in (False, True)
    )  # fmt: skip
    ropes = tuple(full if slides else sliding for slides in config.sliding_layers)
    return replace(config, layer_ropes=ropes)


def _rope(**fields: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, rope=replace(config.rope, **fields))


def _fields(**fields: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, **fields)


def _other_base_in_sliding_layers(config: ModelConfig) -> ModelConfig:
    ropes = tuple(
        replace(rope, theta=rope.theta * 2) if slides else rope
        for rope, slides in zip(config.layer_ropes, config.sliding_layers, strict=True)
    )
    return replace(config, layer_ropes=ropes)


MUTATIONS: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "1 + w forgotten": ("Gemma2", _fields(norm_offset=0.0)),
    "no soft cap of scores": ("Gemma2", _fields(attention_softcap=None)),
    "no soft cap of logits": ("Gemma2", _fields(logits_softcap=None)),
    "a window of one more": ("Gemma2", lambda config: replace(config, sliding_window=8)),
    "a window of one less": ("Olmo3", lambda config: replace(config, sliding_window=6)),
    "embeddings as they are": ("Gemma3", _fields(embedding_multiplier=1.0)),
    "another activation": ("Gemma3", _fields(activation="silu")),
    "a wrong base in sliding layers": ("Gemma3", _other_base_in_sliding_layers),
    "the other layers' RoPE": ("Olmo3", _swapped),
    "RoPE in every layer": ("SmolLM3", _fields(layer_ropes=())),
    "no residual multiplier": ("Granite", _fields(residual_multiplier=1.0)),
    "no logits divisor": ("Granite", _fields(logits_divisor=1.0)),
    "another attention scale": ("Granite", _fields(attention_scale=None)),
    "no scale of queries": ("Ministral3", _rope(query_scale_beta=0.0)),
    "no attention factor": ("Llama-yarn", _rope(attention_factor=1.0)),
    "other rotations": ("Llama-yarn", _rope(beta_slow=0.25)),
    "no yarn": ("Llama-yarn", _rope(kind="default")),
    "halves for neighbours": ("Glm4", _fields(interleaved_rope=False)),
    "all of the head turned": ("Phi3", _fields(rotary_dim=None)),
    "short factors": (
        "Phi3-longrope",
        lambda config: replace(
            config, rope=replace(config.rope, long_factors=config.rope.short_factors)
        ),
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_mistakes(load_case, mutation):
    name, mutate = MUTATIONS[mutation]
    case = load_case(name)
    wrong = replace(case, config=mutate(case.config))
    assert wrong.config != case.config
    check_fails(case, wrong.runner())
