"""read_gguf_tokenizer: reads the tokenizer and chat templates of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from asyncllm.checkpoint.gguf_file import GGUFFile
from asyncllm.checkpoint.importing import importing_transformers
from asyncllm.errors import ModelLoadError
from asyncllm.validation import explain

_TEMPLATE_KEY = "tokenizer.chat_template"


def read_gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """Read a GGUF file's tokenizer with transformers.

    Returns:
        The tokenizer, its special tokens by name ("eos_token"), and the chat templates by name.

    Raises:
        ModelLoadError: if the file is damaged, or transformers does not support its tokenizer.
    """
    metadata = GGUFFile(path).metadata  # GGUFFile checks lengths; transformers does not.
    with importing_transformers():
        _check_pre_tokenizer(path, metadata)
        from transformers import PreTrainedTokenizerFast

        try:
            loaded: Any = PreTrainedTokenizerFast.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True
            )
            backend = _truncate_vocabulary(
                loaded.backend_tokenizer, metadata["tokenizer.ggml.tokens"]
            )
        except Exception as error:  # transformers' converters raise errors of any class.
            raise ModelLoadError(
                f"{path}: transformers makes no tokenizer of it ({explain(error)})"
            ) from error
    backend.no_truncation()
    backend.no_padding()
    named = {
        name: token for name, token in loaded.special_tokens_map.items() if isinstance(token, str)
    }
    templates = {
        key.removeprefix(f"{_TEMPLATE_KEY}.") if key != _TEMPLATE_KEY else "default": source
        for key, source in metadata.items()
        if (key == _TEMPLATE_KEY or key.startswith(f"{_TEMPLATE_KEY}.")) and isinstance(source, str)
    }
    return backend, named, templates


def _check_pre_tokenizer(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a byte-level vocabulary whose pre-tokenizer transformers does not
    know, and would silently replace by GPT-2's."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        # Other versions of transformers lack this table: they choose the pre-tokenizer by the
        # model's architecture.
        return
    known, split = {"gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}, metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and split not in known:
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.pre is {split!r}, expected {', '.join(sorted(known))}; "
            "tokenizer= takes the tokenizer of the original model instead"
        )


def _truncate_vocabulary(backend: tokenizers.Tokenizer, size: int) -> tokenizers.Tokenizer:
    """Copy of ``backend`` without tokens from id ``size`` on.

    transformers adds the special tokens of the model that its tokenizer class was written for. The
    file's model may have no embedding for them.
    """
    description = json.loads(backend.to_str())
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["id"] < size
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(description))
