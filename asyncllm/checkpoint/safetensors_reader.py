"""SafetensorsReader: reads the tensors of a model's safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from asyncllm.checkpoint.file_version import FileVersion
from asyncllm.checkpoint.model_files import weight_files
from asyncllm.checkpoint.reader import QuantisedTensor, TensorInfo
from asyncllm.checkpoint.small_file import converting_read_errors
from asyncllm.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor


MAX_MAPPED_FILES = 2
"""Maximum number of files that stay mapped: two, because a layer may span two files."""


class SafetensorsReader:
    """CheckpointReader for the safetensors files of a model directory.

    Only the most recently used files stay mapped, so that little of the checkpoint is in memory
    beside the loaded weights.

    Raises:
        ModelLoadError: if a file is missing or damaged; if a file changes while it is read; if two
            files have a tensor of the same name; if there are no tensors.
    """

    quantisation_label = ignored_quantisation = ""

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._mapped_files: dict[Path, Any] = {}
        self._file_versions: dict[Path, FileVersion] = {}
        for path in weight_files(directory):
            self._add_tensors(path)
        if not self.tensors:
            raise ModelLoadError(f"{directory}: its safetensors files have no tensor")

    def _add_tensors(self, path: Path) -> None:
        with converting_read_errors(path):
            version = self._file_versions[path] = FileVersion(path)
        try:
            # safe_open checks the header against the file's length.
            with converting_read_errors(path):
                self._mapped_file(path)
                with path.open("rb") as file:
                    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        except (SafetensorError, ValueError) as error:
            raise ModelLoadError(
                f"{path}: not a whole safetensors file ({version.size} bytes): {error}"
            ) from error
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in self.tensors:
                raise ModelLoadError(f"{name}: both in {self.tensors[name].file} and in {path}")
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            self.tensors[name] = TensorInfo(path, shape, entry["dtype"], end - start)

    def _mapped_file(self, path: Path) -> Any:
        self._file_versions[path].check_unchanged()
        file = self._mapped_files.pop(path, None)
        if file is None:
            file = safe_open(path, framework="pt", device="cpu")
        self._mapped_files[path] = file
        while len(self._mapped_files) > MAX_MAPPED_FILES:
            del self._mapped_files[next(iter(self._mapped_files))]
        return file

    def tensor(self, name: str) -> Tensor:
        """Read a tensor, as a view of the mapped file."""
        path = self.tensors[name].file
        try:
            with converting_read_errors(path):
                return self._mapped_file(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{path}: tensor {name!r} cannot be read: {error}") from error

    def slices(self, name: str) -> Iterator[Tensor]:
        """Yield the whole tensor as one slice: it is a view of the file, which takes no memory."""
        yield self.tensor(name)

    def quantised_tensor(self, name: str) -> QuantisedTensor | None:
        return None

    def close(self) -> None:
        self._mapped_files.clear()
