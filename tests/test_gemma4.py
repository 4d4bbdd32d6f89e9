"""Gemma 4 on the engine's own decoder: what its layers share and differ in. Its parity with
transformers is among that of the other families (test_dense_families.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.kv_cache import block_bytes
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.architectures import total_parameter_size
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_plan
from asyncllm.gpu.models.per_layer_embeddings import LayerWithPerLayerEmbedding
from asyncllm.gpu.models.rope import inverse_frequencies
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.weights import load_weights
from tests.dense_cases import BACKEND, load_case  # noqa: F401 - a fixture, by its name
from tests.driver import state_of
from tests.families import TINY
from tests.model_configs import read
from tests.parity import check_fails, check_sizes, setting, with_tensors

CPU = torch.device("cpu")
FULL, SLIDING = "full_attention", "sliding_attention"


def _layers(runner: ModelRunner) -> list[Any]:
    """Its layers without what is around them."""
    state = state_of(runner)
    return [
        each.layer if isinstance(each, LayerWithPerLayerEmbedding) else each
        for each in state.model.layers
    ]


def _mixers(runner: ModelRunner) -> list[Any]:
    return [layer.mixer.block for layer in _layers(runner)]


def _other_kv(runner: ModelRunner) -> None:
    """Of the sharing layers of a kind the KV of an earlier layer of that kind."""
    mixers = _mixers(runner)
    state = state_of(runner)
    for mixer in mixers[-2:]:
        mixer.kv_index -= 2
        assert (
            state.cache.layers[mixer.kv_index].shape == state.cache.layers[mixer.kv_index + 2].shape
        )
    for mixer in mixers[:2]:
        mixer.shares_kv = True


def _neighbours_input(runner: ModelRunner) -> None:
    state = state_of(runner)
    for layer in state.model.layers:
        layer.index = (layer.index + 1) % len(state.model.layers)


def _normed_keys_for_values(runner: ModelRunner) -> None:
    """With the weight of the norm of keys, behind which values are taken."""
    for mixer in _mixers(runner):
        if mixer.rope_and_cache.shape.head_dim == 32:
            own = mixer.rope_and_cache
            own.v_norm.weight = own.norm.weight[own.shape.num_heads]


def _other_rows_for_values(runner: ModelRunner) -> None:
    """In full layers."""
    for mixer in _mixers(runner):
        if mixer.rope_and_cache.shape.head_dim == 32:
            weight = mixer.qkv.weight
            weight[-32:] = weight[:32]


def _config(**fields: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, **fields)


def _whole_rope(config: ModelConfig) -> ModelConfig:
    return replace(
        config, layer_ropes=tuple(replace(r, rotated_fraction=1.0) for r in config.layer_ropes)
    )


EXPERTS = "experts_beside_mlp"
MUTATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the KV of another layer": ("Gemma4-shared", _other_kv),
    "no scalars": ("Gemma4", setting(_layers, "input_norm.scale", 1.0)),
    "the input of the neighbour": ("Gemma4", _neighbours_input),
    "no norm of values": ("Gemma4", setting(_mixers, "rope_and_cache.v_norm", None)),
    "values behind the norm of keys": ("Gemma4", _normed_keys_for_values),
    "values of other rows than keys": ("Gemma4", _other_rows_for_values),
    "no norm before the router": (
        "Gemma4-experts",
        setting(_layers, f"{EXPERTS}.router_norm", lambda x: x),
    ),
    "no scale of experts": (
        "Gemma4-experts",
        setting(_layers, f"{EXPERTS}.experts.routing.expert_scale", None),
    ),
    "no experts": (
        "Gemma4-experts",
        setting(_layers, f"{EXPERTS}.experts_output_norm", torch.zeros_like),
    ),
}
CONFIGS: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "a window of one more": ("Gemma4", _config(sliding_window=8)),
    "a window of one less": ("Gemma4-shared", _config(sliding_window=6)),
    "another scale of scores": ("Gemma4", _config(attention_scale=None)),
    "no soft cap of logits": ("Gemma4-shared", _config(logits_softcap=None)),
    "all of the head turned": ("Gemma4", _whole_rope),
    "embeddings as they are": ("Gemma4", _config(embedding_multiplier=1.0)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_mistakes(load_case, mutation):
    name, mutate = MUTATIONS[mutation]
    case = load_case(name)
    runner = case.runner(attention_backend="torch")
    mutate(runner)
    check_fails(case, runner)


@pytest.mark.parametrize("mutation", CONFIGS)
def test_the_comparison_sees_another_configuration(load_case, mutation):
    name, mutate = CONFIGS[mutation]
    case = load_case(name)
    wrong = replace(case, config=mutate(case.config))
    assert wrong.config != case.config
    check_fails(case, wrong.runner(attention_backend="torch"))


E4B = TINY | {
    "model_type": "gemma4_text", "num_hidden_layers": 42, "num_kv_shared_layers": 18,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 256, "sliding_window": 512,
    "max_position_embeddings": 131_072, "head_dim": 256, "global_head_dim": 512,
}  # fmt: skip
A4B = TINY | {
    "model_type": "gemma4_text", "num_hidden_layers": 30, "hidden_size_per_layer_input": 0,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
    "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 48, "sliding_window": 1024, "max_position_embeddings": 262_144,
}  # fmt: skip


def groups_of(model: ModelConfig, block_size: int) -> list[Any]:
    kinds = attention_kinds(model)
    attention = {kind: TorchAttention(kind.shape, torch.bfloat16) for kind in kinds}
    return kv_plan(model).kv_groups(attention, block_size)


def test_sharing_layers_have_no_own_memory(tmp_path):
    """24 of 42 layers have KV, in groups of the 4 full ones: with heads half as large twice as many
    tokens in a block. A sequence of 32,768 tokens takes a fifth of what all 42 would take."""
    model = read(tmp_path, E4B)
    groups = groups_of(model, 16)
    assert [(len(g.spec.layers), g.spec.window, g.spec.block_size) for g in groups] == [
        (4, None, 16), *[(4, 512, 32)] * 5,
    ]  # fmt: skip
    assert sorted(layer for group in groups for layer in group.spec.layers) == list(range(24))
    indices = dict(enumerate(kv_plan(model).indices))
    assert [indices[layer] for layer in range(24)] == list(range(24))
    kinds = [layer.head_dim for layer in model.layers]
    assert {(kinds[i], index) for i, index in indices.items() if i >= 24} == {
        (256, 22),
        (512, 23),
    }
    per_block = block_bytes(groups, torch.bfloat16)
    assert per_block == 4 * 16 * 2 * 2 * 512 * 2
    held = sum(group.spec.max_blocks(32_768, 512) for group in groups) * per_block
    bytes_of = {256: 2 * 2 * 256 * 2, 512: 2 * 2 * 512 * 2}
    everything = sum(32_768 * bytes_of[layer.head_dim] for layer in model.layers)
    assert held < 0.2 * everything


def test_six_groups_of_five_layers(tmp_path):
    """25 layers of 8 heads of 256, 5 of 2 heads of 512: half the KV, and twice the tokens."""
    groups = groups_of(read(tmp_path, A4B), 16)
    assert [(len(g.spec.layers), g.spec.window, g.spec.block_size) for g in groups] == [
        (5, None, 32), *[(5, 1024, 16)] * 5,
    ]  # fmt: skip
    held = sum(group.spec.max_blocks(32_768, 1024) for group in groups)
    assert held * block_bytes(groups, torch.bfloat16) < 0.25 * 32_768 * (25 * 8192 + 5 * 4096)


def as_transformers(values: dict[str, Any]) -> Any:
    fields = {name: value for name, value in values.items() if name != "model_type"}
    return transformers.Gemma4TextConfig(**fields)


def test_a_step_that_samples_nothing_ends_with_the_last_write(load_case):
    """Behind the four layers of six that have KV of their own."""
    if BACKEND != "native":
        pytest.skip("no C++ compiler to build the native ops with")
    state = state_of(load_case("Gemma4-shared").runner())
    program = state.forward_pass.program
    written = program.names[: program.args.num_writing_ops]
    assert written[-1] == "rope_and_cache"
    assert written.count("rope_and_cache") == 4
    assert program.names.count("rope_and_cache") == 6


@pytest.mark.parametrize("values", [E4B, A4B], ids=["E4B", "A4B"])
def test_a_file_of_the_hub_is_read_as_transformers_reads_it(tmp_path, values):
    ours = read(tmp_path, values)
    theirs = as_transformers(values)
    assert ours.sliding_layers == tuple(kind == SLIDING for kind in theirs.layer_types)
    found = [(layer.num_kv_heads, layer.head_dim) for layer in ours.layers]
    each = [theirs.per_layer_config[i] for i in range(theirs.num_hidden_layers)]
    assert found == [(layer.num_key_value_heads, layer.head_dim) for layer in each]
    for index, layer in enumerate(ours.layers):
        rope = theirs.rope_parameters[theirs.layer_types[index]]
        assert ours.layer_ropes[index].theta == rope["rope_theta"]
        assert layer.value_is_key == (theirs.attention_k_eq_v and not ours.sliding_layers[index])
        assert (layer.kv_layer is None) == (theirs.kv_sharing_modes[index] != "reuse")
        if layer.kv_layer is not None:
            assert theirs.kv_sharing_modes[layer.kv_layer] == "store"
            assert theirs.layer_types[layer.kv_layer] == theirs.layer_types[index]
    # As transformers saves it: heads by layer.
    config = theirs.to_dict()
    assert "per_layer_config" in config
    assert "global_head_dim" not in config
    again = read(tmp_path, json.loads(json.dumps(config, default=str)))
    assert again.layers == ours.layers
    assert again.layer_ropes == ours.layer_ropes


def test_partial_frequencies_equal_transformers(tmp_path):
    model = read(tmp_path, E4B)
    theirs = as_transformers(E4B)
    rope = model.layer_ropes[-1]
    assert (rope.kind, rope.rotated_fraction, rope.theta) == ("proportional", 0.25, 1e6)
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](theirs, CPU, layer_type=FULL)
    assert torch.equal(inverse_frequencies(rope, 512), expected)
    assert int((expected != 0).sum()) == 64
    stretched = replace(rope, factor=8.0)
    assert torch.equal(inverse_frequencies(stretched, 512), expected / 8)


@pytest.mark.parametrize(
    ("values", "change", "said"),
    [
        (E4B, {"num_kv_shared_layers": 42}, "num_kv_shared_layers is 42, expected .* 0 to 41"),
        (E4B, {"num_kv_shared_layers": 38}, "num_kv_shared_layers is 38, expected fewer: layer 5"),
        (E4B, {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1, expected"),
        (
            E4B,
            {"vocab_size_per_layer_input": 255},
            "vocab_size_per_layer_input is 255, .* from 256",
        ),
        (E4B, {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1, expected"),
        (E4B, {"global_head_dim": 511}, "head_dim is 511, expected an even number, in layer 5"),
        (E4B, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', exp"),
        (E4B, {"sliding_window": 0}, "sliding_window is 0, expected"),
        (E4B, {"layer_types": [FULL] * 41}, "layer_types is .*num_hidden_layers=42"),
        (E4B, {"rope_parameters": {FULL: {"rope_theta": 1e6}}}, "rope_type is missing, expected"),
        (
            E4B,
            {"rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 1e6}}},
            "rope_type is 'yarn', expected 'default' or 'proportional'",
        ),
        (E4B, {"per_layer_config": {"42": {"head_dim": 512}}}, "per_layer_config is .*0 to 41"),
        (E4B, {"per_layer_config": {"x": {"head_dim": 512}}}, "per_layer_config is .*0 to 41"),
        (E4B, {"per_layer_config": {"5": {"skip": []}}}, "5 is .*head_dim alone"),
        (E4B, {"per_layer_config": {"5": {"head_dim": 0}}}, "head_dim is 0, expected"),
        (E4B, {"per_layer_config": {"41": {"head_dim": 128}}}, "per_layer_config is .*layer 41 th"),
        (A4B, {"num_global_key_value_heads": 3}, "num_key_value_heads is 3, .*, in layer 5"),
        (A4B, {"top_k_experts": 129}, "top_k_experts is 129, expected at most num_experts=128"),
        (A4B, {"num_experts": None}, "num_experts is missing"),
        (A4B, {"num_experts": 5000}, "num_experts is 5000, expected .* 1024"),
        (A4B, {"moe_intermediate_size": 0}, "moe_intermediate_size is 0, expected"),
        (A4B, {"enable_moe_block": 1}, "enable_moe_block is 1, expected"),
    ],
)
def test_values_that_are_refused(tmp_path, values, change, said):
    read(tmp_path, values)
    with pytest.raises(ModelLoadError, match=said):
        read(tmp_path, values | change)


def test_the_last_layer_is_full(tmp_path):
    model = read(tmp_path, E4B | {"layer_types": [FULL, *[SLIDING] * 41]})
    assert model.sliding_layers == (False, *[True] * 40, False)


def test_sizes_count_layers_by_their_kind(load_case):
    for name in ("Gemma4-shared", "Gemma4-experts"):
        check_sizes(load_case(name).config)
    wide = load_case("Gemma4-shared").config
    assert [layer.intermediate_size for layer in wide.layers] == [96, 96, 96, 96, 192, 192]
    narrow = replace(wide, layers=tuple(replace(e, intermediate_size=96) for e in wide.layers))
    saved = total_parameter_size(wide, lambda p: p.shape[0] * (p.shape[1] if p.shape[1:] else 1))
    saved -= total_parameter_size(narrow, lambda p: p.shape[0] * (p.shape[1] if p.shape[1:] else 1))
    assert saved == 2 * 3 * 96 * 64


def test_keys_that_no_layer_uses_are_left_out(load_case, tmp_path):
    """Files of the hub have them for the layers that attend to another's; and no others."""
    case = load_case("Gemma4-shared")
    stem = "model.layers.5.self_attn."
    extra = {f"{stem}{name}.weight": torch.zeros(4) for name in ("k_proj", "v_proj", "k_norm")}
    list(load_weights(with_tensors(case, tmp_path, extra), torch.float32, CPU))
    for name in ("model.layers.3.self_attn.v_norm.weight", f"{stem}v_gate.weight"):
        config = with_tensors(case, tmp_path, {name: torch.zeros(4)})
        with pytest.raises(ModelLoadError, match=f"'{name}' is none of this architecture's"):
            list(load_weights(config, torch.float32, CPU))
