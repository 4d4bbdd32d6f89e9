"""Writing the trained network in the layout that Hugging Face tools read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from . import chat
from .network import Network


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, context: int, folder: Path) -> None:
    """The tokenizer with its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat.TEMPLATE, encoding="utf-8")
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": chat.END,
        "pad_token": chat.STOP,
        "additional_special_tokens": [chat.START],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": chat.TEMPLATE,
    })


def write_model(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Weights in bfloat16 and the configurations."""
    shape = network.shape
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in network.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    # The writer makes a private file; a package has to be readable by all.
    (folder / "model.safetensors").chmod(0o644)
    stops = [tokenizer.token_to_id(chat.END), tokenizer.token_to_id(chat.STOP)]
    _write(folder / "config.json", {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "vocab_size": shape.vocab, "hidden_size": shape.hidden,
        "intermediate_size": shape.inner, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head, "hidden_act": "silu",
        "max_position_embeddings": shape.context, "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "tie_word_embeddings": True, "use_cache": True,
        "torch_dtype": "bfloat16", "dtype": "bfloat16",
        "eos_token_id": stops[0], "pad_token_id": stops[1],
    })
    _write(folder / "generation_config.json", {
        "do_sample": True, "temperature": 0.6, "top_p": 0.9,
        "eos_token_id": stops, "pad_token_id": stops[1],
    })
