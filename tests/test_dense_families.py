"""The native decoder's families against transformers' generate, in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.checkpoint.model_config import ModelConfig
from tests.driver import Driver
from tests.families import LONGROPE, YARN, make
from tests.native_library import native_library
from tests.parity import (
    LONG_LENGTHS,
    PROMPT_LENGTHS,
    Case,
    case_loader,
    check_fails,
    check_longrope,
    check_reference,
    run_everything,
    run_matrix,
)
from tests.static_runner import TraceRecorder, make_runner

MINISTRAL = YARN | {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
TWO_ROPES = {
    "full_attention": YARN | {"rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
}

CASES: dict[str, dict[str, Any]] = {
    "Gemma2": {},
    "Gemma3": {"rope_parameters": TWO_ROPES},
    "Gemma4": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "Gemma4-shared": {"seed": 4, "use_double_wide_mlp": True, "final_logit_softcapping": 10.0},
    "Gemma4-experts": {"hidden_size_per_layer_input": 0},
    "Glm4": {"attention_bias": True},
    "Granite": {},
    "GraniteMoeHybrid": {
        "layer_types": ["full_attention"] * 3,
        "num_local_experts": 0,
        "seed": 4,
        "shared_intermediate_size": 80,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "Llama-yarn": {},
    "Ministral3": {"head_dim": 16, "rope_parameters": MINISTRAL},
    "Olmo2": {},
    "Olmo3": {"rope_parameters": TWO_ROPES},
    "Phi3": {},
    "Phi3-longrope": {},
    "SmolLM3": {},
}
"""Settings beside those of tests/families.py; one of each family, and of each kind of RoPE."""

SHAPES: dict[str, dict[str, Any]] = {
    "Gemma2-untied": {"tie_word_embeddings": False, "final_logit_softcapping": None},
    "Gemma2-one-head": {"num_key_value_heads": 1, "attn_logit_softcapping": None, "shard": "60KB"},
    "Gemma2-tied": {
        "seed": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "embedding": 0.04,
    },
    "Gemma3-tied": {
        "seed": 5,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 8.0,
        "embedding": 0.04,
    },
    "Gemma3-biases": {"attention_bias": True, "shard": "60KB", "num_key_value_heads": 4},
    "Gemma3-pattern": {"layer_types": None, "sliding_window_pattern": 2, "rope_parameters": None},
    "Gemma4-dense": {"hidden_size_per_layer_input": 0, "shard": "60KB"},
    "Gemma4-one-size": {"seed": 1, "global_head_dim": 24, "attention_bias": True},
    "Gemma4-alike": {"global_head_dim": 16, "tie_word_embeddings": True, "embedding": 0.04},
    "Gemma4-shared-keys": {
        "seed": 10,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "Gemma4-shared-most": {
        "seed": 5,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": False,
    },
    "Gemma4-shared-pattern": {"layer_types": None, "num_hidden_layers": 8, "gain": 0.8},
    "Gemma4-experts-inputs": {"hidden_size_per_layer_input": 12, "top_k_experts": 3},
    "Glm4-quarter": {"partial_rotary_factor": 0.25, "attention_bias": False, "shard": "60KB"},
    "Glm4-tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "Granite-tied": {"embedding": 0.05, "tie_word_embeddings": True, "rope_parameters": YARN},
    "Granite-biases": {"attention_bias": True, "mlp_bias": True, "shard": "60KB"},
    "GraniteMoeHybrid-nope": {"position_embedding_type": None, "attention_bias": True},
    "Llama-yarn-factor": {"rope_parameters": YARN | {"attention_factor": 0.7, "truncate": False}},
    "Llama-yarn-betas": {"seed": 3, "rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}},
    "Ministral3-window": {"sliding_window": 7, "tie_word_embeddings": True, "shard": "60KB"},
    "Ministral3-sizes": {"num_attention_heads": 6, "head_dim": 24, "num_key_value_heads": 3},
    "Olmo2-heads": {"num_key_value_heads": 4, "shard": "60KB"},
    "Olmo3-pattern": {"layer_types": None, "num_hidden_layers": 4, "rope_parameters": None},
    "Olmo3-tied": {"seed": 2, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "Phi3-window": {"seed": 0, "sliding_window": 9, "tie_word_embeddings": True, "shard": "60KB"},
    "Phi3-longrope-factor": {"rope_parameters": LONGROPE | {"attention_factor": 0.8}},
    "SmolLM3-window": {"use_sliding_window": True, "sliding_window": 7, "attention_bias": True},
    "SmolLM3-tied": {"tie_word_embeddings": True, "mlp_bias": True, "rope_parameters": LLAMA3},
}
"""Further shapes of the cases above, by the longest of their names that one begins with."""

SEEDS = {"Ministral3": 2}
"""Where tests/families.py has none, and 0 gives a model that repeats itself."""

BACKEND = "torch" if native_library() is None else "native"


def base_of(name: str) -> str:
    return max((each for each in CASES if name.startswith(each)), key=len)


@pytest.fixture(scope="module")
def load_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    def make_case(path: Path, name: str) -> Case:
        base = base_of(name)
        settings = {**CASES[base], **SHAPES.get(name, {})}
        settings = ({"seed": SEEDS[base]} if base in SEEDS else {}) | settings
        lengths = LONG_LENGTHS if "longrope" in name else PROMPT_LENGTHS
        return Case.of(path, make(path, base, **settings), lengths=lengths, backend=BACKEND)

    return case_loader(tmp_path_factory, make_case)


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
def test_bfloat16_is_as_near_as_transformers_own(load_case, name, backend):
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


# --- what the comparison sees ----------------------------------------------------------------


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
