"""A random checkpoint that every engine reads: a model of a given shape, with a tokenizer."""

from __future__ import annotations

import argparse
import itertools
import json
import string
from pathlib import Path
from typing import Any

from benchmarks import common

COMMON: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FOLDER = Path(__file__).parent.parent / "build" / "peers"
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "gemma3-270m": {
        "model_type": "gemma3_text",
        "vocab_size": 32_768,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 32_768,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 16,
    },
}
"""As their makers publish them, but for the vocabulary of the last two, which would be half of the
model."""


def options(description: str | None) -> argparse.ArgumentParser:
    """A command line of rounds on such a checkpoint."""
    parser = common.options(description)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--folder", type=Path, default=FOLDER,
                        help="where the checkpoint is made, and kept")  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, help="5 unless given, 2 with --quick")
    return parser


def make(folder: Path, shape: str, layers: int | None = None) -> Path:
    """The checkpoint's directory in ``folder``, written unless it is there; with fewer layers than
    the shape has where ``layers`` says so."""
    values = COMMON | SHAPES[shape]
    family = values.pop("model_type")
    name = f"qwen3-{shape}" if family == "qwen3" else shape
    if layers is not None:
        name, values["num_hidden_layers"] = f"{name}-{layers}-layers", layers
    path = folder / name
    if (path / "tokenizer_config.json").exists():
        return path
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(family, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(path)
    write_tokenizer(path, SHAPES[shape]["vocab_size"])
    return path


def write_tokenizer(path: Path, size: int) -> None:
    """A byte-level BPE of ``size`` tokens: after the bytes the words of two letters, three, and
    so on, so that every token that a model can name is text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {"<|endoftext|>": 0}
    for letter in sorted(ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    merges = []
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if len(vocab) == size:
                break
            vocab["".join(letters)] = len(vocab)
            merges.append(("".join(letters[:-1]), letters[-1]))
        if len(vocab) == size:
            break
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
