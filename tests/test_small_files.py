"""Small files of a model's directory: bounded and regular."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.small_file import (
    MAX_SMALL_FILE_BYTES,
    MAX_TOKENIZER_BYTES,
    read_small_file,
)
from asyncllm.errors import ModelLoadError
from asyncllm.text.tokenizer import Tokenizer
from tests.checkpoints import DEMO_MODEL

READERS: dict[str, Callable[[Path], object]] = {
    "config.json": ModelConfig.from_directory,
    "generation_config.json": ModelConfig.from_directory,
    "tokenizer.json": Tokenizer.from_directory,
    "tokenizer_config.json": Tokenizer.from_directory,
    "chat_template.jinja": Tokenizer.from_directory,
    "model.gguf": lambda path: ModelConfig.from_directory(path / "model.gguf"),
}


def directory(tmp_path: Path, name: str) -> Path:
    """The packaged model without a file; returns where that would be."""
    path = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, path)
    (path / name).unlink(missing_ok=True)
    return path / name


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs and devices")
@pytest.mark.parametrize(
    "make", [lambda file: os.mkfifo(file), lambda file: file.symlink_to("/dev/zero")]
)
@pytest.mark.parametrize("name", READERS)
def test_fifos_and_links_to_devices_are_refused(tmp_path: Path, name: str, make: Any) -> None:
    file = directory(tmp_path, name)
    make(file)
    with pytest.raises(ModelLoadError, match=f"{name}: is no regular file"):
        READERS[name](file.parent)


@pytest.mark.parametrize("name", [name for name in READERS if name != "model.gguf"])
def test_a_sparse_file_takes_no_memory(tmp_path: Path, name: str) -> None:
    file, most = directory(tmp_path, name), MAX_SMALL_FILE_BYTES
    if name == "tokenizer.json":
        most = MAX_TOKENIZER_BYTES
    with file.open("wb") as sparse:
        sparse.truncate(3 << 30)
    with pytest.raises(ModelLoadError, match=f"has {3 << 30} bytes, expected at most {most}"):
        READERS[name](file.parent)


def test_the_bound_counts_bytes_and_links_are_followed(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"12345")
    link.symlink_to(file)
    assert read_small_file(link, 5) == b"12345"
    with pytest.raises(ModelLoadError, match="has 5 bytes, expected at most 4"):
        read_small_file(link, 4)
    with pytest.raises(OSError, match="No such file"):
        read_small_file(tmp_path / "none")


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"123")
    fstat = os.fstat

    def then_longer(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        file.write_bytes(b"12345678")
        return found

    monkeypatch.setattr(os, "fstat", then_longer)
    with pytest.raises(ModelLoadError, match="expected at most 4"):
        read_small_file(file, 4)
