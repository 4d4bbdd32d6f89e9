"""Find a model's files: those that ship with asyncllm, a directory's, or the hub's."""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path
from typing import Unpack

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_choice import GGUF_SUFFIX, choose_gguf, is_gguf, join_names
from asyncllm.checkpoint.gguf_file import gguf_parts
from asyncllm.checkpoint.hub import (
    HubOptions,
    download,
    download_files,
    list_directory,
    list_files,
)
from asyncllm.checkpoint.small_file import converting_read_errors
from asyncllm.errors import ModelLoadError

_WEIGHT_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_WEIGHT_FILE = "model.safetensors"
_CONFIG_PATTERNS = ("config.json", "generation_config.json")
_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER_PATTERNS = tuple(
    "tokenizer* special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "*.tiktoken chat_template* additional_chat_templates/*.jinja tokenization_*.py".split()
)
_TOKENIZER_FILES = tuple(
    "tokenizer.json tokenizer.model tokenizer_config.json vocab.json vocab.txt".split()
)
_MODEL_WITH_QUANTIZATION_PATTERN = re.compile(r"([^:]{2,}):([A-Za-z0-9][A-Za-z0-9._/-]*)")
"""Pattern of a model name with a quantisation, such as "org/repo:Q4_K_M"; a drive "C:" does not
match."""


def resolve_model(
    model: str | os.PathLike[str] | None,
    revision: str | None = None,
    *,
    with_weights: bool = True,
    with_code: bool = False,
    **hub: Unpack[HubOptions],
) -> Path:
    """Find a model's directory or GGUF file, and download it if needed.

    Blocks on files and the network, so it must not run on an event loop's thread.

    Args:
        model: one of

            - a directory, with safetensors or one GGUF file;
            - a GGUF file, or any part of a split one;
            - a hub id ("Qwen/Qwen3-0.6B");
            - a hub id or directory and the quantisation of one of its GGUF files
              ("Qwen/Qwen3-0.6B-GGUF:Q4_K_M"), as ``choose_gguf`` finds it;
            - None for the model in the package.

            A ``str`` is a path if it begins with ".", "/" or "~", has more than one separator, or
            names a file.
        revision: branch, tag or commit; for hub ids only.
        with_weights: fetch and require safetensors; False for a model with random weights.
        with_code: fetch Python files as well.

    Raises:
        ModelLoadError: if no usable model is found; ``__cause__`` is the hub's error, if any.
    """
    patterns = _CONFIG_PATTERNS + _TOKENIZER_PATTERNS + (_WEIGHT_PATTERNS if with_weights else ())
    patterns += ("*.py",) if with_code else ()
    preferred_names = (
        (_SINGLE_WEIGHT_FILE, _WEIGHT_INDEX_FILE) if with_weights else ("config.json",)
    )
    with converting_read_errors(model):
        if model is None:
            directory = _bundled_model_path()
            _refuse_revision("the model in the package", revision)
        else:
            directory = _resolve_location(model, revision, patterns, preferred_names, hub)
        if is_gguf(directory):
            return directory
        if not (directory / "config.json").is_file():
            raise ModelLoadError(
                f"{directory}: config.json is missing; {_describe_contents(directory)}"
            )
        if with_weights:
            weight_files(directory)
        return directory


def resolve_tokenizer(
    tokenizer: str | os.PathLike[str], revision: str | None = None, **hub: Unpack[HubOptions]
) -> Path:
    """Find a tokenizer's directory or GGUF file; arguments and errors as for ``resolve_model``."""
    # If tokenizer.json is missing, transformers reads the tokenizer's class from config.json.
    patterns = ("config.json", *_TOKENIZER_PATTERNS)
    with converting_read_errors(tokenizer):
        directory = _resolve_location(tokenizer, revision, patterns, _TOKENIZER_FILES, hub)
        if is_gguf(directory):
            return directory
        if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelLoadError(
                f"{directory}: holds no tokenizer, expected tokenizer.json; "
                f"{_describe_contents(directory)}"
            )
        return directory


def _resolve_location(
    location: str | os.PathLike[str],
    revision: str | None,
    patterns: tuple[str, ...],
    preferred_names: tuple[str, ...],
    hub: HubOptions,
) -> Path:
    """Find a directory or GGUF file, and download it if needed.

    Args:
        patterns: files to download.
        preferred_names: file names; a directory that contains one of them is returned instead of
            its GGUF file.
    """
    path, quantization = Path(location).expanduser(), None
    if is_gguf(path) and path.is_file():
        _refuse_revision(str(path), revision)
        return gguf_parts(path)[0]
    if isinstance(location, str) and not path.exists():
        match = _MODEL_WITH_QUANTIZATION_PATTERN.fullmatch(location)
        if match:
            location, quantization = match.groups()
            path = Path(location).expanduser()
    if str(location) and path.is_dir():
        _refuse_revision(str(path), revision)
        if quantization is None:
            names = [entry.name for entry in path.iterdir()]
        else:
            names, preferred_names = list_directory(path), ()
        has_gguf = any(name.endswith(GGUF_SUFFIX) for name in names)
        is_preferred = any((path / name).is_file() for name in preferred_names)
        if is_preferred or not (has_gguf or quantization):
            return path
        return path / choose_gguf(names, quantization, str(path))[0]
    if isinstance(location, os.PathLike) or _looks_like_a_path(location):
        reason = "is a file" if path.is_file() else "does not exist"
        raise ModelLoadError(
            f"{location!s}: {reason}, expected a directory, a GGUF file or a hub id"
        )
    where = f"model={location!r}"
    if quantization is None:
        directory = download(location, revision, patterns, hub)
        if any((directory / name).is_file() for name in preferred_names):
            return directory
        names = list_files(location, revision, hub)
        if not any(name.endswith(GGUF_SUFFIX) for name in names):
            return directory
    else:
        names = list_files(location, revision, hub)
    chosen = choose_gguf(names, quantization, where)
    return download_files(location, revision, chosen, hub)[0]


def _looks_like_a_path(location: str) -> bool:
    separators = location.count(os.sep)
    return location.startswith((".", os.sep, "~")) or separators > 1 or os.path.isfile(location)


def _refuse_revision(where: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelLoadError(
            f"revision={revision!r}: {where} has no revisions; a revision goes with a hub id"
        )


def _bundled_model_path() -> Path:
    directory = Path(str(importlib.resources.files("asyncllm") / "demo_model"))
    if not directory.is_dir():
        raise ModelLoadError(
            f"{directory}: the package's own model is not there; it needs the package unpacked "
            "on disk, as pip installs it. Name a model instead."
        )
    return directory


def _describe_contents(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    return f"found {join_names(names, 8)}" if names else "the directory is empty"


def weight_files(directory: Path) -> list[Path]:
    """List a checkpoint's safetensors files: those in its index, or ``model.safetensors``.

    Raises:
        ModelLoadError: if a file is missing, or the index is damaged.
    """
    index = directory / _WEIGHT_INDEX_FILE
    if not index.is_file():
        single = directory / _SINGLE_WEIGHT_FILE
        if not single.is_file():
            raise ModelLoadError(
                f"{directory}: neither {_SINGLE_WEIGHT_FILE} nor {_WEIGHT_INDEX_FILE}, the only "
                f"weight format that is read; {_describe_contents(directory)}"
            )
        return [single]
    config = ConfigFile.read(index)
    shards = sorted({str(shard) for shard in config.section("weight_map").values.values()})
    missing = [s for s in shards if Path(s).name != s or not (directory / s).is_file()]
    if missing:
        raise ModelLoadError(
            f"{index}: {len(missing)} of {len(shards)} files in weight_map are missing: "
            f"{join_names(missing, 3)}"
        )
    if not shards:
        raise config.field_error("weight_map", "the file of each tensor")
    return [directory / shard for shard in shards]
