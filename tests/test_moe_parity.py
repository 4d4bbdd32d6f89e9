"""Mixtures of experts on the engine's own decoder, against transformers' generate, in float32."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.experts import ExpertsMLP
from asyncllm.gpu.weights import load_weights
from tests.driver import state_of
from tests.families import EXPERTS, GROUPS, MIXED, SLIDING, TINY, make
from tests.model_configs import read
from tests.native_library import context
from tests.parity import (
    OUTPUT,
    Case,
    case_loader,
    check_fails,
    check_reference,
    check_sizes,
    run_everything,
    run_matrix,
    run_static_step,
    setting,
    with_tensors,
)
from tests.reference import generate
from tests.slow import slow_but

ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ROUTED |= {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1}
ROUTED |= {"norm_topk_prob": True, "routed_scaling_factor": 1.7}
ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "use_bias": False}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "beta_fast": 32.0}
YARN |= {"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32}

CASES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2, **EXPERTS,
        "num_hidden_layers": 4,
    },
    "Mixtral": {**LOCAL},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 56},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "GptOss": {"head_dim": 16, **SLIDING, **MIXED, **LOCAL, "rope_parameters": YARN},
    "Glm4Moe": {"head_dim": 16, "use_qk_norm": True, **ROUTED},
    "Dots1": {"head_dim": 16, **ROUTED},
    "Ernie4_5_Moe": {**ERNIE},
}  # fmt: skip
"""One of each family."""

VARIANTS: dict[str, dict[str, Any]] = {
    "Qwen3Moe-whole": {"head_dim": 32, "norm_topk_prob": False, **EXPERTS},
    "Qwen3Moe-dense-layers": {
        "head_dim": 16, "mlp_only_layers": [1], "tie_word_embeddings": True, **EXPERTS,
        "attention_bias": True,
    },
    "Mixtral-sliding": {**LOCAL, **SLIDING, "num_experts_per_tok": 1},
    "Olmoe-normalised": {
        "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "num_key_value_heads": 4,
    },
    "GptOss-sliding": {
        "head_dim": 32, **SLIDING, **LOCAL, "num_experts_per_tok": 4, "num_hidden_layers": 4,
        "swiglu_limit": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "Glm4Moe-one-group": {
        "head_dim": 16, "attention_bias": True, **(ROUTED | {"n_group": 1, "topk_group": 1}),
        "partial_rotary_factor": 1.0,
    },
    "Dots1-raw": {
        "head_dim": 16, **(ROUTED | {"norm_topk_prob": False, "first_k_dense_replace": 0}),
        "attention_bias": True,
    },
    "Ernie4_5_Moe-unshared": {**ERNIE, "moe_num_shared_experts": 0, "moe_layer_interval": 2},
}  # fmt: skip

SEEDS = {"Mixtral": 3, "Qwen2Moe": 1, "Ernie4_5_Moe": 1, "Qwen3Moe-dense-layers": 1}
"""Where 0 gives a model that repeats itself."""


def make_case(path: Path, name: str) -> Case:
    family, _, variant = name.partition("-")
    settings = {"seed": SEEDS.get(name, 0), **(VARIANTS if variant else CASES)[name]}
    model = make(path, f"{family}-native", **settings)
    correct(path, model)
    return Case.of(path, model)


def correct(path: Path, model: Any) -> None:
    """Draws correction biases, which are buffers, in the model and in its checkpoint: as large as
    what scores differ by, so that they choose otherwise."""
    file, random_bias = path / "model.safetensors", torch.Generator().manual_seed(5)
    tensors = load_file(file)
    buffers = dict(model.named_buffers()) | dict(model.named_parameters())
    names = [name for name in tensors if name.endswith("e_score_correction_bias")]
    for name in names:
        own = name if name in buffers else name.replace("moe_statics", "gate.moe_statics")
        bias = torch.randn(tensors[name].shape, generator=random_bias) * 0.2
        tensors[name] = bias
        buffers[own].data.copy_(bias)
    if names:
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def load_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return case_loader(tmp_path_factory, make_case)


@pytest.mark.parametrize("name", slow_but(CASES, "Glm4Moe", "GptOss", "Qwen2Moe", "Qwen3Moe"))
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_equals_transformers(load_case, name, backend):
    """In a batch, in chunks, after a prefix hit and a preemption; natively as one program."""
    if backend == "native":
        context()
    case = load_case(name)
    check_reference(case)
    check_sizes(case.config)
    assert case.config.experts is not None
    runner = case.runner(attention_backend=backend)
    if backend == "native":
        assert runner.execution.startswith("one native program of")
    run_everything(case, runner)


@pytest.mark.parametrize("name", slow_but(CASES, "GptOss"))
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
    if name.startswith(("Dots1", "Ernie", "Qwen2Moe")):
        pytest.skip("not among the architectures that are tested through transformers' modules")
    case = load_case(name)
    run_everything(case, case.runner(model_impl="transformers"))


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_int8_covers_experts(load_case, name):
    """All of their weights, and none of the router's; what they compute is near."""
    context()
    case = load_case(name)
    plain = case.runner(attention_backend="native")
    rounded = case.runner(attention_backend="native", quantization="int8")
    layers = [_layers(runner)[-1] for runner in (plain, rounded)]
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    (ids, weights), (others, _) = (layer.mlp.routing(x) for layer in layers)
    assert torch.equal(ids, others)
    expected, found = (layer.mlp.experts(x, ids, weights) for layer in layers)
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.03
    packed = [
        sum(linear.weights.num_bytes for part in layer.mlp.experts.layers for linear in part)
        for layer in layers
    ]
    # Some instruction sets pad the inputs to a multiple of 32, and these are 48.
    assert packed[0] // 4 <= packed[1] <= packed[0] // 4 * 64 // 48


def _layers(runner: ModelRunner) -> list[Any]:
    state = state_of(runner)
    return list(state.model.layers)


def _mlps(runner: ModelRunner) -> list[ExpertsMLP]:
    return [layer.mlp for layer in _layers(runner) if isinstance(layer.mlp, ExpertsMLP)]


def _routed(change: Callable[[Any], Any]) -> Callable[[ModelRunner], None]:
    def mutate(runner: ModelRunner) -> None:
        for mlp in _mlps(runner):
            routing: Any = mlp.routing
            routing.config = change(routing.config)

    return mutate


def _swapped_experts(runner: ModelRunner) -> None:
    for mlp in _mlps(runner):
        experts: Any = mlp.experts
        experts.down[0], experts.down[1] = experts.down[1], experts.down[0]


def _bias_as_weight(runner: ModelRunner) -> None:
    """Weighs with the scores that choose."""
    for mlp in _mlps(runner):
        routing: Any = mlp.routing

        def biased(x: torch.Tensor, own: Any = routing) -> Any:
            ids, _ = own(x)
            logits = x @ own.weight.T
            scores = (logits.sigmoid() + own.correction).gather(1, ids.long())
            return ids, scores / scores.sum(-1, keepdim=True) * own.config.scale

        mlp.routing = biased


MUTATIONS: dict[str, tuple[str, Callable[[ModelRunner], None]]] = {
    "no sinks": (
        "GptOss",
        setting(_layers, "mixer.sinks", (torch.full((4,), -1e9),)),
    ),
    "experts swapped": ("Qwen3Moe", _swapped_experts),
    "weights not renormalised": ("Qwen3Moe", _routed(lambda c: replace(c, renormalise=False))),
    "weights renormalised": ("Olmoe", _routed(lambda c: replace(c, renormalise=True))),
    "softmax for sigmoid": ("Glm4Moe", _routed(lambda c: replace(c, scoring="softmax"))),
    "no groups": ("Glm4Moe", _routed(lambda c: replace(c, num_groups=1, top_groups=1))),
    "no scale": ("Dots1", _routed(lambda c: replace(c, scale=1.0))),
    "correction as weight": ("Glm4Moe", _bias_as_weight),
    "no correction": ("Ernie4_5_Moe", setting(_mlps, "routing.correction", None)),
    "no shared experts": ("Dots1", setting(_mlps, "shared_expert", None)),
    "no gate of the shared expert": ("Qwen2Moe", setting(_mlps, "gate", None)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_mistakes(load_case, mutation):
    name, mutate = MUTATIONS[mutation]
    case = load_case(name)
    runner = case.runner()
    mutate(runner)
    check_fails(case, runner)


def fuse(path: Path, target: Path) -> None:
    """Writes a checkpoint of numbered experts with one tensor for all, as modules have them."""
    tensors = load_file(path / "model.safetensors")
    config = ModelConfig.from_directory(path)
    assert config.experts is not None
    names, count = config.experts.names, config.experts.routing.num_experts
    for layer in range(config.num_layers):
        if not config.experts.layers[layer]:
            continue
        there = f"model.layers.{layer}."

        def take(part: str, there: str = there) -> torch.Tensor:
            stem = f"{there}{names.experts}."
            return torch.stack([tensors.pop(f"{stem}{i}.{part}.weight") for i in range(count)])

        gate, up, down = map(take, names.projections)
        tensors[f"{there}{names.fused_experts}.gate_up_proj"] = torch.cat((gate, up), 1)
        tensors[f"{there}{names.fused_experts}.down_proj"] = down
        router = tensors.pop(f"{there}{names.router}.weight")
        tensors[f"{there}mlp.gate.weight"] = router
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((path / "config.json").read_text())


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_fused_names_are_the_same_weights(load_case, tmp_path, name):
    case, cpu = load_case(name), torch.device("cpu")
    fuse(case.path, tmp_path)
    plain = list(load_weights(case.config, torch.float32, cpu))
    fused = list(load_weights(ModelConfig.from_directory(tmp_path), torch.float32, cpu))
    assert [name for name, _ in plain] == [name for name, _ in fused]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(plain, fused, strict=True))


def to_mxfp4(case: Case, target: Path) -> Any:
    """Writes gpt-oss's checkpoint with random experts in MXFP4, and returns a model that has what
    transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, draw = copy.deepcopy(case.model), torch.Generator().manual_seed(6)
    tensors = load_file(case.path / "model.safetensors")
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, width, outputs = parameter.shape
        shape = (count, outputs, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(122, 125, shape, generator=draw, dtype=torch.uint8)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.data = convert_moe_packed_tensors(
            blocks.clone(), scales.clone(), dtype=torch.float32
        )
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((case.path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (target / "config.json").write_text(json.dumps(config))
    return model


def test_experts_in_mxfp4(load_case, tmp_path):
    context()
    case = load_case("GptOss")
    model = to_mxfp4(case, tmp_path)
    expected = [generate(model, prompt, OUTPUT) for prompt in case.prompts]
    assert expected[1].tokens != case.expected[1].tokens
    config = ModelConfig.from_directory(tmp_path)
    assert config.quantization == "mxfp4"
    quantised = Case(tmp_path, model, config, case.prompts, expected)
    run_everything(quantised, quantised.runner(attention_backend="native"))


def test_missing_or_extra_experts_are_named(load_case, tmp_path):
    case = load_case("Qwen3Moe")
    stem = "model.layers.1.mlp.experts."
    tensors: dict[str, torch.Tensor | None]
    for tensors, said in (
        ({f"{stem}3.up_proj.weight": None}, rf"'{stem}3.up_proj.weight' is missing, .*\(48, 64\)"),
        ({f"{stem}6.up_proj.weight": torch.zeros(48, 64)}, rf"'{stem}6.up_proj.weight' is none of"),
        (
            {f"{stem}0.down_proj.weight": torch.zeros(64, 40)},
            rf"'{stem}0.down_proj.weight' is F32 of shape \(64, 40\), expected .* \(64, 48\)",
        ),
        (
            {"model.layers.1.mlp.gate.weight": torch.zeros(5, 64)},
            r"\(5, 64\), expected .*\(6, 64\)",
        ),
    ):
        config = with_tensors(case, tmp_path, tensors)
        with pytest.raises(ModelLoadError, match=said):
            list(load_weights(config, torch.float32, torch.device("cpu")))


def test_fused_experts_of_another_count_are_named(load_case, tmp_path):
    case = load_case("GptOss")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    config = with_tensors(case, tmp_path, {name: torch.zeros(5, 64, 192)})
    with pytest.raises(ModelLoadError, match=rf"'{name}' is .*\(5, 64, 192\), .*\(6, 64, 192\)"):
        list(load_weights(config, torch.float32, torch.device("cpu")))


def test_multi_token_prediction_layers_are_skipped(load_case, tmp_path):
    case = load_case("Glm4Moe")
    extra = "model.layers.3.eh_proj.weight"
    config = with_tensors(case, tmp_path, {extra: torch.zeros(4, 4)})
    list(load_weights(config, torch.float32, torch.device("cpu")))
    config = with_tensors(case, tmp_path, {extra.replace("3", "4"): torch.zeros(4, 4)})
    with pytest.raises(ModelLoadError, match=r"layers\.4\.eh_proj\.weight' is none of"):
        list(load_weights(config, torch.float32, torch.device("cpu")))


QWEN3 = TINY | {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS}
GLM = TINY | {"model_type": "glm4_moe", **ROUTED, **(GROUPS | ROUTED)}
GPT = TINY | {"model_type": "gpt_oss", **LOCAL}


@pytest.mark.parametrize(
    ("config", "fields", "said"),
    [
        (QWEN3, {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, expected at most num_exp"),
        (QWEN3, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0, expected"),
        (QWEN3, {"num_experts_per_tok": None}, "num_experts_per_tok is missing, expected"),
        (QWEN3, {"num_experts": 5000}, "num_experts is 5000, expected .* 1024"),
        (QWEN3, {"num_experts": None}, "num_experts is missing"),
        (QWEN3, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh', expected"),
        (QWEN3, {"moe_intermediate_size": 0}, "moe_intermediate_size is 0, expected"),
        (QWEN3, {"moe_intermediate_size": "48"}, "moe_intermediate_size is '48', expected"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected"),
        (QWEN3, {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\], expected .* 0 to 2"),
        (QWEN3, {"mlp_only_layers": 1}, "mlp_only_layers is 1, expected a list"),
        (QWEN3, {"norm_topk_prob": 1}, "norm_topk_prob is 1, expected"),
        (GLM, {"n_group": 3}, "n_group is 3, expected a divisor of n_routed_experts=8"),
        (GLM, {"n_group": 8}, "n_group is 8, expected .* at most half of it"),
        (GLM, {"topk_group": 5}, "topk_group is 5, expected 2 to n_group=4 groups of 2 experts"),
        (GLM, {"topk_group": 1}, "topk_group is 1, expected 2 to .* num_experts_per_tok=3"),
        (GLM, {"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0, expected"),
        (GLM, {"n_shared_experts": 0}, "n_shared_experts is 0, expected"),
        (GLM, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1, expected"),
        (GPT, {"swiglu_limit": 0.0}, "swiglu_limit is 0.0, expected"),
        (GPT, {"layer_types": ["full_attention"]}, "layer_types is .*num_hidden_layers=3"),
        (TINY | {"model_type": "olmoe", **EXPERTS}, {"clip_qkv": 2.0}, "clip_qkv is 2.0, expected"),
        (TINY | {"model_type": "ernie4_5_moe", **ERNIE}, {"use_bias": True}, "use_bias is True"),
    ],
)  # fmt: skip
def test_bad_numbers_are_named(tmp_path, config, fields, said):
    assert read(tmp_path, config).experts is not None
    with pytest.raises(ModelLoadError, match=said):
        read(tmp_path, config | fields)


def test_a_model_without_a_layer_of_experts_is_dense(tmp_path):
    assert read(tmp_path, QWEN3 | {"decoder_sparse_step": 9}).experts is None
