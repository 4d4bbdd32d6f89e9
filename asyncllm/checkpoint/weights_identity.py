"""WeightsIdentity: identifies a checkpoint's weights by its files' names, sizes and times."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncllm.checkpoint.gguf_choice import is_gguf
from asyncllm.checkpoint.gguf_file import gguf_parts
from asyncllm.checkpoint.model_files import weight_files
from asyncllm.checkpoint.small_file import read_small_file

_HUB_HASH_PATTERN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class WeightsIdentity:
    """Names, sizes and times of a checkpoint's weight files, and a digest of its configuration.

    Checkpoints with equal identities have equal weights, unless a file is rewritten within the
    resolution of its times. Compare the identities before and after reading the weights: they
    differ if the checkpoint was replaced meanwhile.

    Attributes:
        paths: the files that have weights.
        files: one description per file. In the hub's cache, where a file's name is the hash of its
            content, that hash and the size; elsewhere path, size, times and inode.
        names_and_sizes: name and size of each file; a copy of the files has the same.
        config_digest: digest of config.json, whose quantisation section tells how to read weights;
            empty for GGUF.
    """

    paths: tuple[Path, ...]
    files: tuple[dict[str, Any], ...]
    names_and_sizes: tuple[tuple[str, int], ...]
    config_digest: str

    @classmethod
    def of(cls, path: Path) -> WeightsIdentity:
        """Read the identity of the weights in a model's directory or GGUF file.

        Raises:
            OSError: a file is missing or cannot be read.
            ModelLoadError: the directory has no weights.
        """
        gguf = is_gguf(path)
        paths = tuple(gguf_parts(path) if gguf else weight_files(path))
        statuses = [(each, each.stat()) for each in paths]
        config = b"" if gguf else read_small_file(path / "config.json")
        return cls(
            paths,
            tuple(_describe_file(each, status) for each, status in statuses),
            tuple((each.name, status.st_size) for each, status in statuses),
            hashlib.blake2b(config, digest_size=16).hexdigest() if config else "",
        )


def _describe_file(path: Path, status: os.stat_result) -> dict[str, Any]:
    target = path.resolve()
    if (
        path.is_symlink()
        and target.parent.name == "blobs"
        and _HUB_HASH_PATTERN.fullmatch(target.name)
    ):
        return {"name": path.name, "size": status.st_size, "hash": target.name}
    return {
        "path": str(target),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }
