"""transformers' modules on the engine's runner, against transformers' generate, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.ops import torch_attention
from asyncllm.gpu.transformers_model import attention as paged
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.families import TESTED, is_tested
from asyncllm.gpu.transformers_model.linear import OpExperts
from asyncllm.gpu.transformers_model.rope import LongRope
from tests.driver import Driver, Sequence
from tests.families import CASES, make, noise
from tests.native_library import native_library
from tests.packing import CASES as FORMATS
from tests.packing import quantise_checkpoint
from tests.reference import Expected, Tally, compare, generate

OUTPUT = 24
PROMPT_LENGTHS = (5, 33, 16)
LONG_LENGTHS = (33, 47, 40)
"""Where transformers' frequencies would change within a shorter one."""

SETTINGS = {
    "block_size": 4,
    "num_blocks": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
}


@dataclass
class Case:
    """A checkpoint, and what transformers makes of it."""

    path: Path
    model: Any
    prompts: list[list[int]]
    expected: list[Expected]

    def config(self) -> TransformersConfig:
        return TransformersConfig.from_directory(self.path)

    def runner(self, **overrides: Any) -> ModelRunner:
        settings: dict[str, Any] = {"attention_backend": "torch"}
        return build_model_runner(EngineConfig(**(SETTINGS | settings | overrides)), self.config())


@pytest.fixture(scope="module")
def load_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def load(name: str) -> Case:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            model = make(path, name)
            draw = random.Random(1)
            lengths = LONG_LENGTHS if name.endswith("longrope") else PROMPT_LENGTHS
            prompts = [[draw.randrange(256) for _ in range(n)] for n in lengths]
            expected = [generate(model, prompt, OUTPUT) for prompt in prompts]
            made[name] = Case(path, model, prompts, expected)
        return made[name]

    return load


def check(case: Case, seqs: list[Sequence], indices: list[int]) -> None:
    tally = Tally()
    for seq, index in zip(seqs, indices, strict=True):
        compare(seq, case.expected[index], tally)
    assert tally.ties <= 1


def run_everything(case: Case, runner: ModelRunner, chunk: int = 7) -> None:
    """A batch in chunks, with a prefix hit on its longest prompt, where the model keeps no states,
    and a preemption."""
    driver = Driver(runner)
    seqs = [driver.add(prompt, OUTPUT) for prompt in case.prompts]
    again = driver.add(case.prompts[1], OUTPUT)
    step = 0
    while not all(seq.done for seq in (*seqs, again)):
        if step == 8 and not runner.info.has_states:
            driver.share(seqs[1], again, num_blocks=24 // runner.info.block_size)
        if step == 12:
            driver.release(seqs[0])
        live = [seq for seq in seqs if not seq.done]
        live += [again] if step >= 8 and not again.done else []
        driver.launch([(seq, min(chunk, seq.known - seq.computed)) for seq in live])
        driver.collect()
        step += 1
    assert step > 24
    check(case, [*seqs, again], [0, 1, 2, 1])


def run_matrix(case: Case, backend: str, chunks: tuple[int, ...] = (3, 10)) -> None:
    """Each prompt alone, one in chunks of every size, all in a batch, and with run-ahead.

    Args:
        chunks: of the batches.
    """
    runner = case.runner(attention_backend=backend)
    for index, prompt in enumerate(case.prompts):
        driver = Driver(runner)
        seq = driver.add(prompt, OUTPUT)
        driver.run([seq])
        check(case, [seq], [index])
    for chunk in range(1, 34):
        driver = Driver(runner)
        seq = driver.add(case.prompts[1], 3)
        driver.run([seq], chunk=chunk)
        compare(seq, case.expected[1], Tally())
    for chunk in chunks:
        run_everything(case, runner, chunk)
    driver = Driver(case.runner(attention_backend=backend, async_scheduling=True))
    seqs = [driver.add(prompt, OUTPUT) for prompt in case.prompts]
    driver.run(seqs, chunk=7, depth=2)
    check(case, seqs, [0, 1, 2])


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(load_case, name):
    case = load_case(name)
    tokens = zip(case.prompts, case.expected, strict=True)
    assert max(noise(case.model, prompt + each.tokens) for prompt, each in tokens) < 3e-5
    for expected in case.expected:
        assert len(set(expected.tokens)) >= 8
    assert is_tested(case.config())
    run_everything(case, case.runner())


def test_every_tested_architecture_has_a_case(load_case):
    stems = {name.partition("-")[0] for name in CASES}
    classes = {CASES[stem].get("class", f"{stem}ForCausalLM") for stem in stems}
    assert classes == set(TESTED)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", CASES)
def test_matrix(load_case, name, backend):
    if backend == "native" and native_library() is None:
        pytest.skip("no C++ compiler to build the native ops with")
    if backend == "native" and name == "Mamba2":
        pytest.skip("it has no attention")
    run_matrix(load_case(name), backend)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "DeepseekV3", "Qwen3_5"])
def test_native_ops(load_case, name):
    if native_library() is None:
        pytest.skip("no C++ compiler to build the native ops with")
    case = load_case(name)
    run_everything(case, case.runner(attention_backend="native"))


@pytest.mark.parametrize(
    ("family", "form"), [("Gemma2", "fp8-ragged"), ("Olmo2", "gptq-act-order")]
)
def test_a_quantised_checkpoint(tmp_path, family, form):
    model = make(tmp_path, family)
    quantise_checkpoint(tmp_path, FORMATS[form], model)
    prompts = [[5, 6, 7, 8], [100, 3, 9, 9, 41, 7, 200]]
    case = Case(tmp_path, model, prompts, [generate(model, prompt, 12) for prompt in prompts])
    assert case.config().quantization == FORMATS[form].config["quant_method"]
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
    case = Case(tmp_path, model, [[5, 6, 7, 8]], [expected])
    runner = case.runner()
    state = runner._state
    assert state is not None
    shapes = [tuple(one.shape) for one in state.decoder.base.parameters()]
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


def test_longrope_chooses_its_factors_by_the_longest_sequence(load_case):
    case = load_case("Phi3-longrope")
    prompt = case.prompts[0][:7]
    expected = generate(case.model, prompt, OUTPUT)  # 31 tokens of 32: the short factors
    for max_model_len, equal in ((32, True), (33, False)):
        driver = Driver(case.runner(max_model_len=max_model_len))
        seq = driver.add(prompt, OUTPUT)
        driver.run([seq])
        assert (seq.outputs == expected.tokens) is equal


# --- what the comparison sees ------------------------------------------------------------


def _kinds(change):
    def mutate(monkeypatch):
        kinds = paged.attention_kinds

        def changed(probe, windows):
            return [change(kind) for kind in kinds(probe, windows)]

        monkeypatch.setattr("asyncllm.gpu.transformers_model.build.attention_kinds", changed)

    return mutate


def _replace_kind(kind, **fields):
    from dataclasses import replace

    return replace(kind, **fields)


def _replace_shape(kind, **fields):
    from dataclasses import replace

    return replace(kind, shape=replace(kind.shape, **fields))


def _no_sinks(monkeypatch):
    scored = torch_attention.scored_attention
    monkeypatch.setattr(
        torch_attention,
        "scored_attention",
        lambda q, k, v, mask, shape, sinks: scored(q, k, v, mask, shape, None),
    )


def _unweighted_experts(monkeypatch):
    experts = OpExperts.experts
    monkeypatch.setattr(
        OpExperts,
        "experts",
        lambda self, module, hidden, index, weights: experts(
            self, module, hidden, index, torch.full_like(weights, 0.5)
        ),
    )


def _neighbouring_expert(monkeypatch):
    experts = OpExperts.experts
    monkeypatch.setattr(
        OpExperts,
        "experts",
        lambda self, module, hidden, index, weights: experts(
            self, module, hidden, (index + 1) % len(self.up), weights
        ),
    )


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
    choose = LongRope.choose
    monkeypatch.setattr(LongRope, "choose", lambda self, count: choose(self, 1))


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
    "no window": ("Olmo3", _kinds(lambda kind: _replace_kind(kind, window=None))),
    "a window off by one": (
        "Mistral",
        _kinds(lambda kind: _replace_kind(kind, window=kind.window + 1)),
    ),
    "no sinks": ("GptOss", _no_sinks),
    "unweighted experts": ("Mixtral", _unweighted_experts),
    "the neighbouring expert": ("Mixtral", _neighbouring_expert),
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


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_mistakes(load_case, monkeypatch, mutation):
    name, mutate = MUTATIONS[mutation]
    case = load_case(name)
    mutate(monkeypatch)
    driver = Driver(case.runner())
    seq = driver.add(case.prompts[1], OUTPUT)
    driver.run([seq], chunk=10)
    with pytest.raises(AssertionError):
        check(case, [seq], [1])


def test_the_routing_that_mistakes_change_is_the_models_own(load_case, monkeypatch):
    case = load_case("Glm4Moe")
    _routed(lambda router, scores: scores)(monkeypatch)
    driver = Driver(case.runner())
    seq = driver.add(case.prompts[1], OUTPUT)
    driver.run([seq])
    check(case, [seq], [1])


def test_norms_of_one_plus_weight_are_seen(load_case):
    case = load_case("Gemma")
    runner = case.runner()
    state = runner._state
    assert state is not None
    norm = state.decoder.base.norm
    with torch.no_grad():
        norm.weight -= 1.0
    driver = Driver(runner)
    seq = driver.add(case.prompts[1], OUTPUT)
    driver.run([seq])
    with pytest.raises(AssertionError):
        check(case, [seq], [1])
