"""Damaged checkpoints read by transformers' code: a ModelLoadError each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncllm.config import EngineConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.transformers_model.config import TransformersConfig, read_config
from tests.families import GPT2, make

ENDS = {"eos_token_id": None, "bos_token_id": None}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    make(path, "Gemma")
    return path


def with_fields(source: Path, target: Path, **fields: Any) -> Path:
    config = json.loads((source / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("model_type", [], "one that transformers"),
        ("model_type", {"a": 1}, "one that transformers"),
        ("text_config", {"a": 1}, "transformers cannot read it"),
        ("num_hidden_layers", 2**31, "expected an integer from 0 to 1024"),
        ("num_hidden_layers", 10**400, "expected an integer from 0 to 1024"),
        ("num_experts", 2**31, "expected an integer from 0 to 1024"),
        ("text_config", {"num_hidden_layers": 2**31}, "expected an integer from 0 to 1024"),
        ("dtype", "5", "dtype is '5', expected 'float32'"),
        ("torch_dtype", [1], "torch_dtype is [1], expected 'float32'"),
        ("text_config", {"dtype": 1e308}, "dtype is 1e+308, expected 'float32'"),
        ("hidden_size", -1, "transformers cannot build GemmaForCausalLM"),
    ],
)
def test_hostile_fields_are_refused(gemma, tmp_path, field, value, accepted):
    path = with_fields(gemma, tmp_path, **{field: value})
    with pytest.raises(ModelLoadError) as caught:
        TransformersConfig.from_directory(path)
    words = str(caught.value)
    assert words.startswith(f"{path / 'config.json'}: ")
    assert accepted in words
    assert len(words) < 500


@pytest.mark.parametrize("name", ["AutoConfig", "AutoModelForCausalLM"])
@pytest.mark.parametrize("code", ["raise RuntimeError('no')", "raise SystemExit('no')"])
@pytest.mark.usefixtures("own_code")
def test_code_of_a_checkpoint_that_fails_is_named(gemma, tmp_path, name, code):
    (tmp_path / "own.py").write_text(code)
    auto_map = {name: "own.Own"}
    path = with_fields(gemma, tmp_path, auto_map=auto_map, model_type="gemma")
    if name == "AutoConfig":
        with_fields(gemma, tmp_path, auto_map=auto_map, model_type="own")
    with pytest.raises(ModelLoadError, match=r"config\.json: .*: no$"):
        TransformersConfig.from_directory(path, trust_remote_code=True)


def load(path: Path) -> None:
    config = EngineConfig(model=path, model_impl="transformers", dtype="float32", num_blocks=8)
    build_model_runner(config, read_config(path, "transformers"))


NO_FLOATS = "'{}' is .*, expected F64 or F32 or F16 or BF16"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weight: weight[:-1].clone(), r"{} is of shape \(95, 64\), expected \(96, 64\)"),
        (lambda weight: weight.to(torch.int64), NO_FLOATS),
        (lambda weight: weight.to(torch.bool), NO_FLOATS),
        (lambda weight: weight.to(torch.float8_e4m3fn), NO_FLOATS),
    ],
)
def test_weight_of_another_shape_or_kind_is_named(gemma, tmp_path, change, says):
    with_fields(gemma, tmp_path)
    tensors = load_file(gemma / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=says.format(name)):
        load(tmp_path)


def test_class_with_only_custom_attention_is_refused(tmp_path):
    config = transformers.GPTJConfig(vocab_size=64, rotary_dim=8, **GPT2, **ENDS)
    config.save_pretrained(tmp_path)
    path = with_fields(tmp_path, tmp_path, architectures=["GPTJForCausalLM"])
    with pytest.raises(ModelLoadError, match="GPTJForCausalLM: its code takes none but its own"):
        load(path)
