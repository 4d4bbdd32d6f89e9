"""Rows of FAMILIES: fields, refusals and RoPE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.families import FAMILIES
from asyncllm.checkpoint.model_config import ModelConfig, has_native_decoder
from asyncllm.checkpoint.rope_config import RopeConfig, read_rope
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.models.rope import inverse_frequencies, rope_table, rotary_order
from asyncllm.gpu.transformers_model.config import read_config
from tests.dense_cases import BACKEND
from tests.families import LINEAR, LLAMA3, MINISTRAL, MIXED, TINY, YARN, draw_weights
from tests.model_configs import read
from tests.parity import OUTPUT, SETTINGS
from tests.text_part import check_text_part

CPU = torch.device("cpu")


def multimodal(path: Path, name: str, *, tied: bool, **text: Any) -> Any:
    """A checkpoint whose text model is of that family, with a tower for images."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    settings = {**TINY, "head_dim": 16, **text, "tie_word_embeddings": tied}
    images = {"image_token_index": 250, "tie_word_embeddings": tied}
    if name == "Gemma3":
        text_config = transformers.Gemma3TextConfig(**settings)
        images |= {"mm_tokens_per_image": 4, "boi_token_index": 251, "eoi_token_index": 252}
        config = transformers.Gemma3Config(text_config=text_config, vision_config=vision, **images)
    else:
        text_config = transformers.Ministral3Config(**settings)
        vision_config = transformers.PixtralVisionConfig(**vision, head_dim=16)
        config = transformers.Mistral3Config(
            text_config=text_config, vision_config=vision_config, **images
        )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    draw_weights(model, *((9, 1.6, 0.04) if tied else ()))
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize(
    ("name", "architecture", "tied", "text"),
    [
        ("Gemma3", "Gemma3ForCausalLM", True, {"sliding_window": 7, **MIXED}),
        ("Gemma3", "Gemma3ForCausalLM", False, {"sliding_window": 7, **MIXED}),
        ("Mistral3", "Ministral3ForCausalLM", False, {"rope_parameters": MINISTRAL}),
    ],
)
def test_the_text_part_of_a_multimodal_checkpoint(tmp_path, caplog, name, architecture, tied, text):
    model = multimodal(tmp_path, name, tied=tied, **text)
    config = read_config(tmp_path, "auto")
    assert isinstance(config, ModelConfig)
    assert (config.architecture, config.is_text_part) == (architecture, True)
    assert config.tie_word_embeddings is tied
    settings = EngineConfig(**SETTINGS, attention_backend=BACKEND)
    check_text_part(model, config, settings, caplog, prompt_length=40, output=OUTPUT, distinct=8)


def test_missing_text_part_fields_have_family_defaults(tmp_path):
    """As in the files of Gemma 3, whose text configuration has little but what differs."""
    text: dict[str, Any] = {"model_type": "gemma3_text", "hidden_size": 64, "sliding_window": 32}
    text |= {"intermediate_size": 96, "num_hidden_layers": 7}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "eos_token_id": 1}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    values |= {"text_config": text, "eos_token_id": [106, 1], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours = ModelConfig.from_directory(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim,
    )  # fmt: skip
    assert ours.vocab_size == theirs.vocab_size
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert (ours.tie_word_embeddings, ours.dtype) == (True, "bfloat16")
    assert (ours.eos_token_ids, ours.activation) == ((106, 1), "gelu_tanh")
    assert ours.sliding_layers == tuple(kind == "sliding_attention" for kind in theirs.layer_types)
    full = RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert ours.layer_ropes == (RopeConfig(),) * 5 + (full, RopeConfig())


PLAIN: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "gemma2": "Gemma2Config", "gemma3_text": "Gemma3TextConfig", "glm4": "Glm4Config",
    "granite": "GraniteConfig", "granitemoehybrid": "GraniteMoeHybridConfig",
    "llama": "LlamaConfig", "ministral3": "Ministral3Config",
    "mistral": "MistralConfig", "olmo2": "Olmo2Config", "olmo3": "Olmo3Config",
    "phi3": "Phi3Config", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config",
    "qwen3_vl_text": "Qwen3VLTextConfig",
    "smollm3": "SmolLM3Config",
}  # fmt: skip


EXTRA: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "num_local_experts": 0, "layer_types": ["full_attention"] * 4, "mamba_n_heads": 8,
        "position_embedding_type": "rope",
    },
    "ministral3": {"rope_parameters": MINISTRAL},
}  # fmt: skip
"""Without which a file is not of that family."""


def test_every_family_is_read():
    assert set(FAMILIES) == set(CONFIGS)


@pytest.mark.parametrize("family", CONFIGS)
def test_defaults_are_those_of_transformers(tmp_path, family):
    """Of every field that a file may leave out."""
    theirs = getattr(transformers, CONFIGS[family])
    sizes = {k: v for k, v in PLAIN.items() if k != "head_dim"}
    extra = EXTRA.get(family, {})
    ours = read(tmp_path, {**sizes, **extra, "model_type": family})
    config = theirs(**sizes, **extra)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // 4
    assert ours.head_dim == head_dim
    assert ours.rms_norm_eps == config.rms_norm_eps
    # The text part of a multimodal model does not say it of itself.
    assert ours.tie_word_embeddings == getattr(config, "tie_word_embeddings", False)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [] if window else []
    if kinds:
        assert ours.sliding_layers == tuple(kind == "sliding_attention" for kind in kinds)
    if any(ours.sliding_layers):
        assert ours.sliding_window == window
    parameters = config.rope_parameters
    for index in range(4) if ours.layer_ropes else ():
        kind = "sliding_attention" if ours.sliding_layers[index] else "full_attention"
        expected = parameters.get(kind, parameters)["rope_theta"]
        rope_of_layer = ours.layer_ropes[index]
        rotates = getattr(config, "no_rope_layers", [1] * 4)[index]
        assert rope_of_layer.kind == ("default" if rotates else "none")
        assert rope_of_layer.theta == expected or not rotates
    if not ours.layer_ropes:
        assert ours.rope.theta == parameters["rope_theta"]
        rotated = parameters.get("partial_rotary_factor", 1.0) * head_dim
        assert (ours.rotary_dim or head_dim) == rotated
    assert ours.attention_softcap == (50.0 if family == "gemma2" else None)
    assert ours.logits_softcap == getattr(config, "final_logit_softcapping", None)
    small = [each for each in FAMILIES[family].eos_token_ids if each < 512]
    stated = getattr(config, "eos_token_id", None)
    ends = stated if isinstance(stated, list) else [stated]
    assert [each for each in ends if each is not None] == list(FAMILIES[family].eos_token_ids)
    assert ours.eos_token_ids == tuple(small)


FACTORS = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("family", "change", "field", "accepted"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type", "'yarn'"),
        ("llama", {"rope_scaling": YARN | {"factor": 0}}, "factor is 0", "above 0"),
        ("llama", {"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast", "beta_slow=1"),
        ("llama", {"rope_scaling": YARN | {"rope_theta": 1.0}}, "rope_theta", "above 1 with yarn"),
        ("llama", {"rope_scaling": YARN | {"truncate": 1}}, "truncate", "true or false"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5", "1.0"),
        ("phi3", {"rope_scaling": FACTORS | {"short_factor": [1.0]}}, "short_factor", "8 numbers"),
        ("phi3", {"rope_scaling": FACTORS | {"long_factor": [0] * 8}}, "long_factor", "above 0"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "short_factor is missing", "a list of 8"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5", "above 0 to 1"),
        ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor", "an even number of"),
        ("ministral3", {}, "rope_parameters is missing", "a JSON object"),
        (
            "ministral3",
            {"rope_scaling": MINISTRAL | {"llama_4_scaling_beta": -1}},
            "beta",
            "from 0",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers", "num_hidden_layers=4 numbers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers", "0 for no RoPE"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0", "from 1"),
        ("olmo3", {"layer_types": ["chunked"] * 4}, "layer_types", "sliding_attention"),
        ("olmo3", {"sliding_window": None}, "layer_types", "no sliding window is in use"),
        ("olmo3", {"rope_parameters": {"full_attention": 3}}, "full_attention", "a JSON object"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0", "above 0"),
        ("granite", {"residual_multiplier": "0.2"}, "residual_multiplier", "a finite number"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1", "above 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0", "above 0"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation", "gelu_pytorch_tanh"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional", "a decoder"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0", "from 1"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "null"),
    ],
)
def test_values_that_are_refused(tmp_path, family, change, field, accepted):
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, {**PLAIN, "model_type": family, **change})
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "config.json"))
    assert field in message
    assert accepted in message


@pytest.mark.parametrize(
    "change", [{"num_local_experts": 8}, {"layer_types": ["mamba"] * 4}, {"layer_types": None}]
)
def test_granite_4_hybrids_use_transformers(change):
    values = {**PLAIN, **EXTRA["granitemoehybrid"], "model_type": "granitemoehybrid"}
    assert has_native_decoder(ConfigFile(Path("x"), values))
    assert not has_native_decoder(ConfigFile(Path("x"), values | change))


@pytest.mark.parametrize("kind", ["yarn", "longrope", "llama3", "linear", "default"])
@pytest.mark.parametrize("length", [32, 33])
def test_frequencies_are_those_of_transformers(kind, length):
    factors = {"short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 3.5] * 4}
    rope: dict[str, Any] = {"rope_theta": 10_000.0}
    rope |= {"yarn": YARN, "longrope": factors, "llama3": LLAMA3, "linear": LINEAR}.get(kind, {})
    rope |= {"rope_type": kind}
    if kind in ("yarn", "longrope", "llama3"):
        rope["original_max_position_embeddings"] = 32
    ours = read_rope(ConfigFile(Path("x"), PLAIN | {"rope_parameters": rope}), 16)
    config = transformers.LlamaConfig(**PLAIN, rope_parameters=dict(rope))
    if kind == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    torch.testing.assert_close(inverse_frequencies(ours, 16, length), expected)
    assert ours.attention_factor == pytest.approx(factor)
    table = rope_table(ours, 24, 16, length, torch.float32, CPU)
    angles = torch.outer(torch.arange(float(length)), expected)
    torch.testing.assert_close(table[:, :8], angles.cos() * factor)
    torch.testing.assert_close(table[:, 12:20], angles.sin() * factor)
    assert bool((table[:, 8:12] == 1).all() and (table[:, 20:] == 0).all())


def test_queries_are_scaled_by_the_contexts_before_them():
    rope = RopeConfig(query_scale_beta=0.5, original_max_position=4)
    table = rope_table(rope, 8, None, 9, torch.float32, CPU)
    plain = rope_table(RopeConfig(), 8, None, 9, torch.float32, CPU)
    assert table.shape == (9, 2, 8)
    assert torch.equal(table[:, 1], plain)
    scale = 1 + 0.5 * torch.tensor([1.0] * 4 + [2.0] * 4 + [3.0]).log()
    torch.testing.assert_close(table[:, 0], plain * scale.unsqueeze(1))


def test_a_layer_without_rope_turns_nothing():
    table = rope_table(RopeConfig(kind="none"), 8, None, 5, torch.float32, CPU)
    assert torch.equal(table, torch.tensor([1.0] * 4 + [0.0] * 4).expand(5, 8))


def test_partial_rotation_equals_reordered_full_rotation():
    assert rotary_order(8, 8, interleaved=False) is None
    orders = {(4, False): [0, 1, 4, 5, 2, 3, 6, 7], (8, True): [0, 2, 4, 6, 1, 3, 5, 7]}
    orders[4, True] = [0, 2, 4, 5, 1, 3, 6, 7]
    for (size, interleaved), expected in orders.items():
        order = rotary_order(8, size, interleaved=interleaved)
        assert order is not None
        assert order.tolist() == expected
