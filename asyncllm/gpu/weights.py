"""Weights: safetensors files to the decoder's packed parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.progress import Progress
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.models.architectures import Parameter, parameters
from asyncllm.gpu.weight_upload import PinnedUploader

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DUMMY_SEED = 0

_HARMLESS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def load_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    staging: PinnedUploader | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the decoder, in the order of ``parameters``.

    The files are mapped, not read: each parameter is allocated once, and its checkpoint
    tensors are copied and converted into their slices of it. Everything is checked before
    the first parameter is made. To a GPU the copies go through ``PinnedUploader``, so that neither
    side holds a tensor twice; a parameter that was yielded is complete for work on the
    thread's current stream.

    Args:
        staging: how copies get to the device; None is directly on a CPU, and through pinned
            buffers to a GPU.

    Raises:
        ModelLoadError: naming the file, the tensor, and the expected and the found shape.
    """
    wanted = list(parameters(model))
    with ExitStack() as stack:
        checkpoint = _Checkpoint(stack, find_files(model.path))
        checkpoint.check(wanted, tied=model.tie_word_embeddings)
        if staging is None and device.type == "cuda":
            staging = PinnedUploader(device)
        copy = staging.copy if staging is not None else _copy
        total = sum(checkpoint.size_of(part) for p in wanted for part, _ in p.parts)
        done = 0
        for parameter in wanted:
            target = torch.empty(parameter.shape, dtype=dtype, device=device)
            row = 0
            for name, rows in parameter.parts:
                copy(checkpoint.tensor(name), target[row : row + rows])
                row += rows
                done += checkpoint.size_of(name)
                if progress is not None:
                    progress(done, total)
            yield parameter.name, target
        if staging is not None:
            staging.finish()


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def dummy_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields random parameters, the same in every run: norms are 1, biases 0, and matrices
    normal with variance ``1 / columns``, which keeps activations of order 1."""
    generator = torch.Generator(device=device).manual_seed(DUMMY_SEED)
    wanted = list(parameters(model))
    total = sum(torch.Size(p.shape).numel() for p in wanted) * dtype.itemsize
    done = 0
    for parameter in wanted:
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        if len(parameter.shape) > 1:
            tensor.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            tensor.fill_(0.0 if parameter.name.endswith(".bias") else 1.0)
        done += tensor.numel() * dtype.itemsize
        if progress is not None:
            progress(done, total)
        yield parameter.name, tensor


def find_files(path: Path) -> list[Path]:
    """The checkpoint's safetensors files: those in the index, or the single one."""
    index = path / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
            files = [path / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ModelLoadError(
                f"{index}: not an index of safetensors files: {error!r}"
            ) from error
        for file in files:
            if file.parent != path or not file.is_file():
                raise ModelLoadError(f"{file}: named in {INDEX_FILE}, but there is no such file")
        return files
    single = path / SINGLE_FILE
    if not single.is_file():
        raise ModelLoadError(f"{path}: neither {INDEX_FILE} nor {SINGLE_FILE} is there")
    return [single]


class _Checkpoint:
    """Open files, and in which of them each tensor is."""

    def __init__(self, stack: ExitStack, files: Iterable[Path]) -> None:
        self.files: dict[str, tuple[Path, Any]] = {}
        self.sizes: dict[str, int] = {}
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                names = list(file.keys())
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelLoadError(
                    f"{path}: not a whole safetensors file ({path.stat().st_size} bytes): {error}"
                ) from error
            for name in names:
                if name in self.files:
                    raise ModelLoadError(f"{name}: both in {self.files[name][0]} and in {path}")
                self.files[name] = (path, file)

    def check(self, wanted: list[Parameter], *, tied: bool) -> None:
        """Raises ModelLoadError unless every wanted tensor is there and no other is."""
        known = set()
        for parameter in wanted:
            for name, rows in parameter.parts:
                known.add(name)
                self._check_tensor(name, (rows, *parameter.shape[1:]))
        for name, (path, _) in self.files.items():
            if name in known or _HARMLESS.match(name) or (tied and name == "lm_head.weight"):
                continue
            raise ModelLoadError(
                f"{path}: tensor {name!r} is none of this architecture's: the model would be "
                "computed without it"
            )

    def _check_tensor(self, name: str, expected: tuple[int, ...]) -> None:
        if name not in self.files:
            places = ", ".join(sorted({str(path) for path, _ in self.files.values()}))
            raise ModelLoadError(f"{places}: tensor {name!r} is missing, expected {expected}")
        path, file = self.files[name]
        view = file.get_slice(name)
        found, kind = tuple(view.get_shape()), view.get_dtype()
        if found != expected:
            raise ModelLoadError(f"{path}: tensor {name!r} has shape {found}, expected {expected}")
        if kind not in _DTYPES:
            raise ModelLoadError(
                f"{path}: tensor {name!r} is of type {kind}, expected one of {', '.join(_DTYPES)}"
            )
        self.sizes[name] = torch.Size(found).numel() * _DTYPES[kind]

    def size_of(self, name: str) -> int:
        return self.sizes[name]

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file."""
        path, file = self.files[name]
        try:
            return file.get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{path}: tensor {name!r} cannot be read: {error}") from error
