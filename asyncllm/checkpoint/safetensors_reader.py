"""SafetensorsReader: the tensors of one or several safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from asyncllm.checkpoint.model_files import weight_files
from asyncllm.checkpoint.reader import TensorInfo
from asyncllm.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from asyncllm.gpu.formats.codes import Codes


class SafetensorsReader:
    """CheckpointReader for the safetensors files of a model directory, which it maps.

    Raises:
        ModelLoadError: a file is missing or damaged, or two have a tensor of the same name.
    """

    label = ignored = ""

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[Path, Any] = {}
        for path in weight_files(directory):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            # Checks the header against the length of the file.
            self._files[path] = safe_open(path, framework="pt", device="cpu")
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelLoadError(
                f"{path}: not a whole safetensors file ({path.stat().st_size} bytes): {error}"
            ) from error
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in self.tensors:
                raise ModelLoadError(f"{name}: both in {self.tensors[name].file} and in {path}")
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            self.tensors[name] = TensorInfo(path, shape, entry["dtype"], end - start)

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file."""
        path = self.tensors[name].file
        try:
            return self._files[path].get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{path}: tensor {name!r} cannot be read: {error}") from error

    def slices(self, name: str) -> Iterator[Tensor]:
        """The mapped tensor as one slice."""
        yield self.tensor(name)

    def codes(self, name: str) -> Codes | None:
        return None

    def close(self) -> None:
        self._files.clear()
