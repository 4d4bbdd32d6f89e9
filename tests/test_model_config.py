"""ModelConfig.from_directory against transformers' configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.errors import ModelLoadError
from tests.model_configs import LLAMA, QWEN3, read
from tests.processes import python

MISTRAL = QWEN3 | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


SAME = {name: name for name in (
    "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings",
)}  # fmt: skip
SAME |= {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
SAME |= {"num_kv_heads": "num_key_value_heads"}


def assert_same(ours: ModelConfig, theirs: Any) -> None:
    for name, there in SAME.items():
        assert getattr(ours, name) == getattr(theirs, there), name
    head_dim = getattr(theirs, "head_dim", None)
    assert ours.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
    rope = theirs.rope_parameters
    assert ours.rope.theta == rope["rope_theta"]
    assert ours.rope.kind == rope["rope_type"]
    assert ours.rope.factor == rope.get("factor", 1.0)
    if ours.rope.kind == "llama3":
        assert ours.rope.low_freq_factor == rope["low_freq_factor"]
        assert ours.rope.high_freq_factor == rope["high_freq_factor"]
        assert ours.rope.original_max_position == rope["original_max_position_embeddings"]
    if theirs.dtype is not None:
        assert ours.dtype == str(theirs.dtype).removeprefix("torch.")
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos] if eos else [])
    kinds = getattr(theirs, "layer_types", None)
    if kinds is not None:
        assert ours.sliding_layers == tuple(kind == "sliding_attention" for kind in kinds)
    assert ours.sliding_window == (theirs.sliding_window if any(ours.sliding_layers) else None)


SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.5}
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 32, "eos_token_id": [7, 9], "attention_bias": True}),
    "qwen3-defaults": ("Qwen3Config", {}),
    "qwen3-sliding": (
        "Qwen3Config",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    ),
    "qwen3-no-layer-slides": ("Qwen3Config", {"use_sliding_window": True}),
    "qwen2": ("Qwen2Config", {"eos_token_id": 3, "tie_word_embeddings": True}),
    "qwen2-layer-types": (
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        },
    ),
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "dtype": "float16"}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": None, "head_dim": 12}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "llama-3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}}),
    "mistral": ("MistralConfig", {"dtype": "bfloat16"}),
    "mistral-no-window": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("MistralConfig", {"sliding_window": 17}),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_by_transformers(tmp_path, name):
    import transformers

    class_name, values = SAVED[name]
    config = getattr(transformers, class_name)(**(SMALL | values))
    config.save_pretrained(tmp_path)
    ours = ModelConfig.from_directory(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert_same(ours, theirs)
    assert ours.architecture == class_name.replace("Config", "ForCausalLM")
    assert ours.qk_norm == (class_name == "Qwen3Config")
    assert ours.mlp_bias == values.get("mlp_bias", False)
    bias = values.get("attention_bias", False)
    assert ours.attention_bias == (bias or class_name == "Qwen2Config")
    assert ours.output_bias == bias
    assert ours.path == tmp_path
    if class_name == "MistralConfig":
        assert ours.sliding_layers == (theirs.sliding_window is not None,) * 5


@pytest.mark.parametrize(
    "config",
    [
        QWEN3,
        QWEN3 | {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
        QWEN2 | {"head_dim": None},
        LLAMA,
        LLAMA | {"rope_scaling": LLAMA3_ROPE},
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        LLAMA | {"rope_scaling": None, "head_dim": None},
        MISTRAL,
        MISTRAL | {"sliding_window": None},
        {k: v for k, v in QWEN3.items() if k not in ("head_dim", "torch_dtype", "rope_theta")},
        {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")},
    ],
)
def test_keys_of_transformers_4(tmp_path, config):
    from transformers import AutoConfig

    assert_same(read(tmp_path, config), AutoConfig.from_pretrained(tmp_path))


def test_generation_config(tmp_path):
    generation = {
        "eos_token_id": [9, 7],
        "do_sample": False,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": None,
        "repetition_penalty": 1.05,
        "length_penalty": 2.0,
    }
    config = read(tmp_path, QWEN3 | {"eos_token_id": [7, 5]}, generation)
    assert config.eos_token_ids == (9, 7, 5)
    assert config.generation_defaults == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }
    without = ModelConfig.from_directory(tmp_path, use_generation_defaults=False)
    assert (without.generation_defaults, without.eos_token_ids) == ({}, (9, 7, 5))


@pytest.mark.parametrize(
    ("change", "field", "accepted"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architectures", "Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "gemma"}, "model_type", "'qwen3'"),
        ({"architectures": None, "model_type": None}, "architectures", "LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act", "silu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method", "awq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor", "above 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type", "'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "factor", "a finite number"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor", "above"),
        ({"rope_scaling": "linear"}, "rope_scaling", "object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters",
            "all layers",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "1.0"),
        ({"hidden_size": "64"}, "hidden_size", "an integer from 1"),
        ({"hidden_size": True}, "hidden_size", "an integer from 1"),
        ({"hidden_size": None}, "hidden_size is missing", "an integer from 1"),
        ({"vocab_size": 0}, "vocab_size", "an integer from 1"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers", "an integer from 1"),
        # Loops and allocations of that length would not end.
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "an integer from 1 to 1024"),
        ({"vocab_size": 10**12}, "vocab_size", "an integer from 1 to 16777216"),
        ({"hidden_size": 10**70}, "hidden_size", "an integer from 1 to 16777216"),
        ({"num_attention_heads": 2**40}, "num_attention_heads", "an integer from 1 to 16777216"),
        ({"head_dim": 2**40}, "head_dim", "an integer from 1 to 16777216"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings", "to 2147483647"),
        ({"rms_norm_eps": 10**70}, "rms_norm_eps", "above 0 to 1"),
        ({"rope_theta": 1e300}, "rope_theta", "to 1e+12"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "a finite number above 0"),
        ({"rope_theta": -1}, "rope_theta", "a finite number above 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "num_attention_heads=8"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "hidden_size", ""),
        ({"head_dim": 15}, "head_dim", "even"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
        ({"torch_dtype": "float64"}, "torch_dtype", "'bfloat16'"),
        ({"dtype": "int8"}, "dtype", "'bfloat16'"),
        ({"eos_token_id": 512}, "eos_token_id", "0 to 511"),
        ({"eos_token_id": ["x"]}, "eos_token_id is 'x'", "token ids"),
        ({"layer_types": ["full_attention"]}, "layer_types", "num_hidden_layers=4"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types", "sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types", "full_attention alone"),
        ({"use_sliding_window": True, "sliding_window": -1}, "sliding_window", "from 1"),
    ],
)
def test_refused(tmp_path, change, field, accepted):
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, QWEN3 | change)
    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert field in message
    assert accepted in message
    value = change.get(field)
    if value is not None and field != "rope_theta":
        assert repr(value) in message


def test_default_eos_is_only_for_files_that_name_none(tmp_path):
    assert read(tmp_path, LLAMA).eos_token_ids == (2,)
    assert read(tmp_path, LLAMA | {"eos_token_id": None}).eos_token_ids == ()
    assert read(tmp_path, LLAMA, {"eos_token_id": 11}).eos_token_ids == (11,)


def test_kv_heads_must_be_stated_but_for_llama(tmp_path):
    without = {k: v for k, v in MISTRAL.items() if k != "num_key_value_heads"}
    with pytest.raises(ModelLoadError, match="num_key_value_heads is missing"):
        read(tmp_path, without)
    assert read(tmp_path, without | {"num_key_value_heads": None}).num_kv_heads == 8


def test_mistral_layer_types(tmp_path):
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    with pytest.raises(ModelLoadError, match="layer_types"):
        read(tmp_path, MISTRAL | {"layer_types": layers, "sliding_window": 8})
    same = ["sliding_attention"] * 4
    assert all(read(tmp_path, MISTRAL | {"layer_types": same}).sliding_layers)


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": "high"}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": 2**63}, "top_k"),
        ({"temperature": 1e300}, "temperature"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"eos_token_id": 99999}, "eos_token_id"),
    ],
)
def test_generation_config_refused(tmp_path, generation, field):
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {field}[ =]"):
        read(tmp_path, QWEN3, generation)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, r"config\.json: cannot be read"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[1]", "expected a JSON object"),
    ],
)
def test_broken_files(tmp_path, data, said):
    if data is not None:
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelLoadError, match=said):
        ModelConfig.from_directory(tmp_path)
    read(tmp_path, QWEN3)
    (tmp_path / "generation_config.json").write_text("no")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("asyncllm.text.detokenizer, asyncllm.text.text_decoder", {"tokenizers", "asyncio"}),
        (
            "asyncllm.checkpoint.model_files, asyncllm.text.tokenizer, asyncllm.text.detokenizer;"
            "from asyncllm.checkpoint.model_config import ModelConfig as C;"
            "C.from_directory(sys.argv[1])",
            {"huggingface_hub"},
        ),
    ],
    ids=["text", "files"],
)
def test_heavy_libraries_are_not_imported(tmp_path, code, lacks):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    code = f"import sys, {code}; print(*{lacks | {'torch', 'transformers'}} & {{*sys.modules}})"
    assert python("-c", code, str(tmp_path), check=True).stdout == "\n"
