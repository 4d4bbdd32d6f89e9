"""A checkpoint without weights: ``config.json`` and a tokenizer, for ``load_format="dummy"``; and
one with weights for engines of several dtypes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.models.architectures import parameters
from asyncllm.gpu.weights import dummy_weights
from benchmarks.gpu.shapes import ModelShape


def write_checkpoint(path: Path, shape: ModelShape) -> Path:
    """Writes it to ``path``, which is made if it is not there, and returns that."""
    return write_config(path, shape.config())


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    """The same for any ``config.json``."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocabulary = json.dumps(tokenizer(config["vocab_size"]))
    (path / "tokenizer.json").write_text(vocabulary, encoding="utf-8")
    return path


def write_weights(path: Path, config: Mapping[str, Any]) -> Path:
    """``write_config`` with the random weights of a model in bfloat16, which engines in float32 and
    in bfloat16 load alike. No tensor may be a stack, as experts' are in some checkpoints."""
    model = ModelConfig.from_directory(write_config(path, config))
    drawn = dict(dummy_weights(model, torch.bfloat16, torch.device("cpu")))
    tensors: dict[str, torch.Tensor] = {}
    for parameter in parameters(model):
        rows = drawn[parameter.name].split([count for _, count in parameter.parts])
        names = (name for name, _ in parameter.parts)
        tensors |= {name: part.clone() for name, part in zip(names, rows, strict=True)}
    save_file(tensors, path / "model.safetensors")
    return path


def tokenizer(vocab: int) -> dict[str, object]:
    """A byte-level BPE tokenizer without merges whose every token is a word, so that each
    token that is sampled has text to be decoded."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {f"Ġ{_word(i)}": i for i in range(vocab)},
            "merges": [],
        },
    }


def _word(number: int) -> str:
    """Letters, another word for every number."""
    letters = ""
    while True:
        letters = chr(ord("a") + number % 26) + letters
        number = number // 26 - 1
        if number < 0:
            return letters
