"""transformers' modules on the engine's runner, against transformers' generate, in float32."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.ops import torch_attention
from asyncllm.gpu.transformers_model import attention as paged
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.decoder import LongRope
from asyncllm.gpu.transformers_model.families import TESTED_ARCHITECTURES, is_tested
from asyncllm.gpu.transformers_model.linear import OpSetExperts
from tests.driver import Driver, state_of
from tests.families import CASES, make
from tests.native_library import context
from tests.packing import CASES as FORMATS
from tests.packing import quantise_checkpoint
from tests.parity import (
    LONG_LENGTHS,
    OUTPUT,
    PROMPT_LENGTHS,
    SETTINGS,
    Case,
    case_loader,
    check,
    check_fails,
    check_longrope,
    check_reference,
    run_everything,
    run_matrix,
)
from tests.reference import generate
from tests.slow import slow_but


@pytest.fixture(scope="module")
def load_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    def make_case(path: Path, name: str) -> Case:
        lengths = LONG_LENGTHS if name.endswith("longrope") else PROMPT_LENGTHS
        return Case.of(path, make(path, name), "transformers", lengths=lengths)

    return case_loader(tmp_path_factory, make_case)


KINDS = ("DeepseekV3", "GPT2", "Gemma4-shared", "Lfm2")
"""One of each kind of layer, position and state that ``test_native_ops`` does not run."""


@pytest.mark.parametrize("name", slow_but(CASES, *KINDS))
def test_equals_transformers(load_case, name):
    case = load_case(name)
    check_reference(case)
    assert is_tested(TransformersConfig.from_directory(case.path))
    run_everything(case, case.runner())


def test_every_tested_architecture_has_a_case(load_case):
    stems = {name.partition("-")[0] for name in CASES}
    classes = {CASES[stem].get("class", f"{stem}ForCausalLM") for stem in stems}
    assert classes == TESTED_ARCHITECTURES
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("These architectures are compared")[2]
    assert set(re.findall(r"^\| `(\w+)` \| .", table, re.MULTILINE)) == TESTED_ARCHITECTURES


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", CASES)
def test_matrix(load_case, name, backend):
    if backend == "native":
        context()
    run_matrix(load_case(name), backend)


NATIVE = ["Gemma2", "GptOss", "DeepseekV3", "Mamba2", "Qwen3_5"]


@pytest.mark.usefixtures("small_bandwidth_probe")
@pytest.mark.parametrize("name", slow_but(NATIVE, "GptOss", "Mamba2", "Qwen3_5"))
def test_native_ops(load_case, name):
    context()
    case = load_case(name)
    runner = case.runner(attention_backend="native")
    assert runner.report().op_set == "native"
    run_everything(case, runner)


@pytest.mark.usefixtures("small_bandwidth_probe")
def test_attention_free_linear_layers_are_quantised(load_case):
    context()
    case, found = load_case("Mamba2"), []
    for name in (None, "int8"):
        runner = case.runner(attention_backend="native", quantization=name)
        driver = Driver(runner)
        seq = driver.add(case.prompts[1], 1)
        driver.run([seq])
        likely = {one.token_id: one.logprob for one in seq.logprobs[0].top}
        found.append((likely, runner.report().weight_bytes))
    (plain, whole), (rounded, fewer) = found
    token = next(iter(plain))
    assert 1e-5 < abs(plain[token] - rounded[token]) < 0.1
    assert fewer < 0.6 * whole


@pytest.mark.parametrize(
    ("family", "form"), [("Gemma2", "fp8-ragged"), ("Olmo2", "gptq-act-order")]
)
def test_a_quantised_checkpoint(tmp_path, family, form):
    model = make(tmp_path, family)
    quantise_checkpoint(tmp_path, FORMATS[form], model)
    prompts = [[5, 6, 7, 8], [100, 3, 9, 9, 41, 7, 200]]
    case = Case(tmp_path, model, None, prompts, [generate(model, prompt, 12) for prompt in prompts])
    config = TransformersConfig.from_directory(tmp_path)
    assert config.quantization == FORMATS[form].config["quant_method"]
    driver = Driver(case.runner())
    seqs = [driver.add(prompt, 12) for prompt in prompts]
    driver.run(seqs)
    check(case, seqs, [0, 1])
    with pytest.raises(InvalidRequestError, match="quantised already"):
        case.runner(quantization="int8", attention_backend="native")


@pytest.mark.parametrize("family", ["Gemma3", "Llama"])
def test_a_tied_head_shares_the_embeddings_table(tmp_path, family):
    """Gemma's embedding scales what it looks up, in a class of its own."""
    model = make(tmp_path, family, tie_word_embeddings=True)
    expected = generate(model, [5, 6, 7, 8], 12)
    case = Case(tmp_path, model, None, [[5, 6, 7, 8]], [expected])
    runner = case.runner()
    state = state_of(runner)
    shapes = [tuple(one.shape) for one in state.model.base.parameters()]
    assert (256, 64) not in shapes
    driver = Driver(runner)
    seq = driver.add([5, 6, 7, 8], 12)
    driver.run([seq])
    check(case, [seq], [0])


def test_load_progress_counts_every_tensor(tmp_path):
    make(tmp_path, "Gemma2")
    seen: list[tuple[int, int]] = []
    config = EngineConfig(**(SETTINGS | {"attention_backend": "torch"}))
    model = TransformersConfig.from_directory(tmp_path)
    build_model_runner(config, model, lambda done, total, **_: seen.append((done, total)))
    total = seen[0][1]
    done = [number for number, of in seen if of == total]
    assert done == sorted(done)
    assert done[-1] == total
    steps = [after - before for before, after in pairwise(done)]
    assert max(steps) < total / 4


@pytest.mark.slow
def test_longrope_chooses_its_factors_by_the_longest_sequence(load_case):
    check_longrope(load_case("Phi3-longrope"))


def _kinds(change):
    def mutate(monkeypatch):
        kinds = paged.attention_kinds

        def changed(probe, windows):
            return [change(kind) for kind in kinds(probe, windows)]

        monkeypatch.setattr("asyncllm.gpu.transformers_model.build.attention_kinds", changed)

    return mutate


def _replace_shape(kind, **fields):
    return replace(kind, shape=replace(kind.shape, **fields))


def _no_sinks(monkeypatch):
    scored = torch_attention.eager_attention
    monkeypatch.setattr(
        torch_attention,
        "eager_attention",
        lambda q, k, v, mask, shape, sinks: scored(q, k, v, mask, shape, None),
    )


def _experts(change):
    """``change`` of the chosen experts, their weights and how many there are."""

    def mutate(monkeypatch):
        experts = OpSetExperts.experts

        def changed(self, module, hidden, index, weights):
            return experts(self, module, hidden, *change(index, weights, len(self.up)))

        monkeypatch.setattr(OpSetExperts, "experts", changed)

    return mutate


def _routed(change):
    """Another routing by GLM-4's router: ``change`` of it and its scores ``[T, experts]``, and of
    the chosen experts, gives their weights."""

    def mutate(monkeypatch):
        route = Glm4MoeTopkRouter.forward

        def changed(self, hidden):
            logits, _, chosen = route(self, hidden)
            weights = change(self, logits.sigmoid()).gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        monkeypatch.setattr(Glm4MoeTopkRouter, "forward", changed)

    return mutate


def _no_correction(monkeypatch):
    route = Glm4MoeTopkRouter.forward

    def changed(self, hidden):
        bias = self.e_score_correction_bias
        self.e_score_correction_bias = torch.zeros_like(bias)
        try:
            return route(self, hidden)
        finally:
            self.e_score_correction_bias = bias

    monkeypatch.setattr(Glm4MoeTopkRouter, "forward", changed)


def _short_longrope(monkeypatch):
    choose = LongRope.choose_frequencies
    monkeypatch.setattr(LongRope, "choose_frequencies", lambda self, count: choose(self, 1))


def _config(**fields):
    """A wrong reading of the configuration."""

    def mutate(monkeypatch):
        read = TransformersConfig.from_directory

        def changed(path, **options):
            model = read(path, **options)
            for name, value in fields.items():
                setattr(model.config, name, value)
            return model

        monkeypatch.setattr(TransformersConfig, "from_directory", changed)

    return mutate


MUTATIONS = {
    "no softcap": ("Gemma2", _kinds(lambda kind: _replace_shape(kind, softcap=None))),
    "a softcap of 4": ("Gemma2", _kinds(lambda kind: _replace_shape(kind, softcap=4.0))),
    "no final softcap": ("Gemma2", _config(final_logit_softcapping=None)),
    "another scale": ("Gemma2", _kinds(lambda kind: _replace_shape(kind, scale=0.25))),
    "no window": ("Olmo3", _kinds(lambda kind: replace(kind, window=None))),
    "a window off by one": (
        "Mistral",
        _kinds(lambda kind: replace(kind, window=kind.window + 1)),
    ),
    "no sinks": ("GptOss", _no_sinks),
    "unweighted experts": ("Mixtral", _experts(lambda i, w, n: (i, torch.full_like(w, 0.5)))),
    "the neighbouring expert": ("Mixtral", _experts(lambda i, w, n: ((i + 1) % n, w))),
    "routing weights not renormalised": ("Qwen3Moe", _config(norm_topk_prob=False)),
    "a router's bias used as a weight": (
        "Glm4Moe",
        _routed(lambda router, scores: scores + router.e_score_correction_bias),
    ),
    "a router without its bias": ("Glm4Moe", _no_correction),
    "a wrong RoPE base in one kind of layer": (
        "Gemma3",
        _config(
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": 1_000_000.0}
                for kind in ("sliding_attention", "full_attention")
            }
        ),
    ),
    "a wrong RoPE base": (
        "Llama",
        _config(rope_parameters={"rope_type": "default", "rope_theta": 5_000.0}),
    ),
    "no yarn": (
        "Llama-yarn",
        _config(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
    ),
    "short factors": ("Phi3-longrope", _short_longrope),
    "no logits scaling": ("Granite", _config(logits_scaling=1.0)),
    "no embedding multiplier": ("Granite", _config(embedding_multiplier=1.0)),
    "a RoPE in every layer": ("SmolLM3", _config(no_rope_layers=[1, 1, 1])),
    "another eps": ("Gemma", _config(rms_norm_eps=1e-2)),
}


OFTEN = "a window off by one", "no sinks", "the neighbouring expert", "a wrong RoPE base"


@pytest.mark.parametrize("mutation", slow_but(MUTATIONS, *OFTEN))
def test_the_comparison_sees_mistakes(load_case, monkeypatch, mutation):
    name, mutate = MUTATIONS[mutation]
    case = load_case(name)
    mutate(monkeypatch)
    check_fails(case, case.runner())


def test_patched_routing_is_used_by_the_model(load_case, monkeypatch):
    case = load_case("Glm4Moe")
    _routed(lambda router, scores: scores)(monkeypatch)
    driver = Driver(case.runner())
    seq = driver.add(case.prompts[1], OUTPUT)
    driver.run([seq])
    check(case, [seq], [1])


def test_norms_of_one_plus_weight_are_seen(load_case):
    case = load_case("Gemma")
    runner = case.runner()
    state = state_of(runner)
    norm = state.model.base.norm
    with torch.no_grad():
        norm.weight -= 1.0
    check_fails(case, runner)
